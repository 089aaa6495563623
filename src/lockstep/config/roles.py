"""Names of roles. A file of its own without pydantic, which takes longer to import than `lockstep top` needs to start."""

from collections.abc import Mapping

ROLE_OF_PROCESSES: Mapping[str, str] = {
    "rollout engines": "rollout",
    "the scorers": "reward",
    "trainer ranks": "policy",
    "the environments": "environment",
}
"""How waits name all processes of a role, and the role."""
