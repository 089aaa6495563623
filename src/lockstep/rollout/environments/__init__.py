"""Conversations: what an environment is, and where it runs.

from lockstep.rollout.environments import Observation
"""

from lockstep.rollout.environments.environment_protocol import Environment, Observation

__all__ = ["Environment", "Observation"]
