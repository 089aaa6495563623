"""Lockstep: reinforcement-learning post-training that never waits in silence."""

__version__ = "0.1.0"
