"""Names of roles. Apart from the models: `lockstep top` imports this, and pydantic takes 0.2 s to import."""

from collections.abc import Mapping

ROLE_OF_PROCESSES: Mapping[str, str] = {
    "rollout engines": "rollout",
    "the scorers": "reward",
    "trainer ranks": "policy",
    "the environments": "environment",
}
"""How waits name all processes of a role, and the role."""
