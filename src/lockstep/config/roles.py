"""Names of roles."""

from collections.abc import Mapping

TOGETHER: Mapping[str, str] = {
    "rollout engines": "rollout",
    "the scorers": "reward",
    "trainer ranks": "policy",
    "the environments": "environment",
}
"""What waits call all processes of a role, and the role."""
