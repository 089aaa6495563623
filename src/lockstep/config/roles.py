"""Names of roles. In a file without pydantic, which takes 0.2 s to import: `lockstep top` imports it."""

from collections.abc import Mapping

ROLE_OF_PROCESSES: Mapping[str, str] = {
    "rollout engines": "rollout",
    "the scorers": "reward",
    "trainer ranks": "policy",
    "critic ranks": "critic",
    "the environments": "environment",
}
"""The role that a wait means if it names all processes of a role."""

UNTRAINED_ROLES = ("rollout", "reward", "environment", "weights")
"""Roles of processes without a trainer. All other roles are trained models."""


def name_of_ranks(role: str) -> str:
    """What a wait for all ranks of a trained role names."""
    return "trainer ranks" if role == "policy" else f"{role} ranks"
