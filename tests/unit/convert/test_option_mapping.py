"""The converter's tables: complete, without contradictions, and with fields that exist."""

import pytest

from lockstep.config.loader import dotted_keys
from lockstep.config.other_frameworks import ABSENT_KEYS, QUALIFIED_KEYS, RENAMED_KEYS
from lockstep.config.recipes import RECIPES
from lockstep.convert.inference_stages import INFERENCE, inference_options, server_options
from lockstep.convert.option_mapping import mapping_table
from lockstep.convert.vlm_r1.vlm_r1_options import vlm_r1_options
from lockstep.doctor.configs.option_tables import option_programs, option_table
from lockstep.doctor.configs.training_commands import TRL_COMMANDS
from lockstep.doctor.configs.trl_settings import trl_options

FRAMEWORKS = ("openrlhf", "verl", "trl", "vlm-r1")
KNOWN = {key for recipe in RECIPES.values() for key in dotted_keys(recipe)}
PROGRAMS = [
    *[
        ("openrlhf", each, frozenset(option_table("openrlhf", each).options))
        for each in option_programs("openrlhf")
        if each != INFERENCE
    ],
    ("openrlhf", "openrlhf.cli.train_dpo", frozenset(inference_options())),
    *[("verl", each, frozenset(option_table("verl", each).options)) for each in option_programs("verl")],
    ("trl", "grpo", frozenset(server_options())),
    *[("trl", program, frozenset(trl_options(program))) for program in (*TRL_COMMANDS, "online_dpo")],
    ("vlm-r1", "grpo", frozenset(vlm_r1_options())),
]  # fmt: skip


@pytest.mark.parametrize(
    ("framework", "program", "options"), PROGRAMS, ids=lambda value: "" if isinstance(value, frozenset) else value
)
def test_every_option_of_every_known_version_has_a_row(framework: str, program: str, options: frozenset[str]) -> None:
    assert len(options) > 15
    table = mapping_table(framework)
    assert sorted(name for name in options if table.row(name, program) is None) == []


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_row_says_one_thing_and_names_fields_that_exist(framework: str) -> None:
    for row in mapping_table(framework).rows:
        assert sum((bool(row.to), bool(row.unneeded), bool(row.unsupported))) == 1, row.names
        assert set(row.to) <= KNOWN, row.names
        assert not row.values or not row.by_rule, row.names


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_name_has_one_row_per_program(framework: str) -> None:
    seen: dict[tuple[str, str], tuple[str, ...]] = {}
    for row in mapping_table(framework).rows:
        for name in row.names:
            for program in row.programs or ("",):
                assert (name, program) not in seen, name
                seen[name, program] = row.names


def test_the_hints_for_keys_of_other_frameworks_agree() -> None:
    """What a refused key is said to be called here is what the converter makes of it."""
    rows = [row for framework in FRAMEWORKS for row in mapping_table(framework).rows]
    wrong = []
    for key, hint in (RENAMED_KEYS | QUALIFIED_KEYS).items():
        mine = [
            row for row in rows
            if row.to and any(name == key or name.removeprefix("actor_rollout_ref.") == key for name in row.names)
        ]  # fmt: skip
        fields = [field for row in mine for field in row.to]
        if mine and not any(field in hint or field.rpartition(".")[0] in hint for field in fields):
            wrong.append((key, hint, fields))
    assert wrong == []
    converted = {name for row in rows if row.to and not row.by_rule for name in row.names}
    assert sorted(converted & ABSENT_KEYS.keys()) == []


def test_the_longest_pattern_counts() -> None:
    table = mapping_table("verl")
    general = table.row("actor_rollout_ref.rollout.engine_kwargs.sglang.x", "main_ppo")
    special = table.row("actor_rollout_ref.rollout.engine_kwargs.vllm.x", "main_ppo")
    assert general is not None and special is not None
    assert general.unneeded and special.to == ("rollout.engine.extra",)
