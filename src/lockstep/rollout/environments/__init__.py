"""Environments of multi-turn conversations: their protocol, and the processes they run in.

from lockstep.rollout.environments import Observation
"""

from lockstep.rollout.environments.environment_protocol import Environment, Observation

__all__ = ["Environment", "Observation"]
