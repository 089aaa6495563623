"""Names of roles. In a file without pydantic, which takes 0.2 s to import: `lockstep top` imports it."""

from collections.abc import Mapping

ROLE_OF_PROCESSES: Mapping[str, str] = {
    "rollout engines": "rollout",
    "the scorers": "reward",
    "trainer ranks": "policy",
    "the environments": "environment",
}
"""The role that a wait means if it names all processes of a role."""
