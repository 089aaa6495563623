"""Names of roles and workers. In a file without pydantic, which takes 0.2 s to import: `lockstep top` imports it."""

from collections.abc import Mapping

ROLE_OF_PROCESSES: Mapping[str, str] = {
    "rollout engines": "rollout",
    "the scorers": "reward",
    "trainer ranks": "policy",
    "critic ranks": "critic",
    "reference ranks": "reference",
    "the environments": "environment",
}
"""The role that a wait means if it names all processes of a role."""

ROLES_WITHOUT_RANKS = ("rollout", "reward", "environment", "weights")
"""Roles whose processes work, and are replaced, one by one. The processes of all other roles, such as policy and
reference, are the ranks of one model: they need each other, and are replaced together."""


REWARD_MODEL = "reward_model"
"""The role of a reward model; further ones are `reward_model_2`, ..."""


def section_of_role(role: str) -> str:
    """The name of a role in `placement` and `recovery`: that of all reward models is the same."""
    return REWARD_MODEL if role.startswith(f"{REWARD_MODEL}_") else role


def name_of_ranks(role: str) -> str:
    """What a wait for all ranks of a role names."""
    return "trainer ranks" if role == "policy" else f"{role} ranks"


def planned_name(name: str) -> str:
    """The planned name of a worker or of one of its replacements: `engine-0` for `engine-0.2`."""
    return name.partition(".")[0]
