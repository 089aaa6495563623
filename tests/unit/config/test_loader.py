"""Config files, overrides, and the errors in them."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from lockstep.config.errors import ConfigError
from lockstep.config.loader import (
    apply_overrides,
    check_config,
    load_config,
    read_yaml,
)
from lockstep.config.recipes import RECIPES, GRPOConfig

EXAMPLES = Path(__file__).parents[3] / "examples"


def grpo(**changes: Any) -> dict[str, Any]:
    return {
        "recipe": "grpo",
        "name": "x",
        "steps": 3,
        "model": {"path": "m"},
        "data": {"path": "d.jsonl"},
        "reward": {"terms": [{"kind": "exact_match"}]},
        **changes,
    }


def problems(values: dict[str, Any]) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        check_config(values, "test")
    return {problem.field: f"{problem.message} ({problem.hint})" for problem in caught.value.problems}


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("*.yaml")), ids=lambda file: file.name)
def test_examples_are_valid(file: Path) -> None:
    assert isinstance(load_config(file), tuple(RECIPES.values()))


def test_truncated_sampling_needs_the_trainers_ratio() -> None:
    cut = {"sampling": {"top_p": 0.9, "top_k": 20}}
    config = check_config(grpo(rollout=cut, loss={"old_logprobs": "trainer"}), "test")
    assert config.rollout.sampling.top_k == 20
    greedy = {"data": {"path": "e.jsonl"}, "sampling": {"temperature": 0, "top_p": 0.5}}
    assert check_config(grpo(evaluation=greedy), "test").evaluation is not None


def test_the_config_survives_a_round_trip_through_json() -> None:
    config = check_config(grpo(cluster="local", advantage={"kind": "rloo"}), "test")
    again = check_config(config.model_dump(mode="json"), "again")
    assert again == config
    assert config.cluster.kind == "local"


@pytest.mark.parametrize(
    ("values", "field", "hint"),
    [
        (grpo(grop_size=4), "grop_size", "did you mean 'group_size'?"),
        (grpo(loss={"clip_lo": 0.1}), "loss.clip_lo", "did you mean 'clip_low'?"),
        (grpo(model={"path": "m", "dtipe": "auto"}), "model.dtipe", "did you mean 'dtype'?"),
        (grpo(num_generations=4), "num_generations", "'group_size'"),
        (grpo(learning_rate=1e-4), "learning_rate", "'trainer.optimizer.lr'"),
        (grpo(coefficient=0.1), "coefficient", "'loss.kl.coefficient'"),
        (
            grpo(reward={"terms": [{"kind": "exact_match", "ignorecase": True}]}),
            "reward.terms.0.ignorecase",
            "ignore_case",
        ),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_one(values: dict[str, Any], field: str, hint: str) -> None:
    found = problems(values)
    assert list(found) == [field]
    assert "unknown key" in found[field]
    assert hint in found[field]


def test_everything_wrong_is_reported_at_once() -> None:
    found = problems(grpo(steps="many", loss={"kl": {"coefficient": -1}}, recipes=1, group_size=0))
    assert set(found) == {"steps", "loss.kl.coefficient", "recipes", "group_size"}
    assert "'many'" in found["steps"]


def test_an_empty_name_or_a_missing_field_is_named() -> None:
    values = grpo(name="../x")
    del values["model"]
    found = problems(values)
    assert "is required" in found["model"]
    assert "../x" in found["name"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"minibatch_size": 12}, ["minibatch_size 12", "group_size 8"]),
        ({"prompts_per_step": 4, "minibatch_size": 24}, ["divide the 32"]),
        ({"token_budget": 100, "rollout": {"sampling": {"max_tokens": 100}}}, ["token_budget 100", "101"]),
        ({"model": {"path": "m", "max_length": 64}}, ["max_length 64", "256"]),
        ({"loss": {"importance": {"kind": "truncate"}}}, ["loss.old_logprobs=trainer"]),
        ({"loss": {"kind": "gspo", "importance": {"kind": "mask"}}}, ["loss.old_logprobs=trainer"]),
        ({"loss": {"kind": "gspo", "dual_clip": 3}}, ["another kind has this key", "clip_low"]),
        ({"loss": {"kind": "gspoo"}}, ["'gspoo'", "'ppo_clip', 'gspo', 'cispo'"]),
        ({"loss": {"importance": {"kind": "truncate", "floor": 0.5}, "old_logprobs": "trainer"}}, ["kind mask"]),
        ({"loss": {"importance": {"kind": "mask", "floor": 3}, "old_logprobs": "trainer"}}, ["less than cap 2"]),
        (
            {"rollout": {"max_staleness": 1}, "loss": {"old_logprobs": "trainer"}},
            ["old_logprobs=engine (the importance ratio"],
        ),
        (
            {"group_size": 1, "advantage": {"kind": "reinforce_plus_plus"}, "filter_groups": {"enable": True}},
            ["filter_groups.enable with group_size 1"],
        ),
        ({"advantage": {"kind": "gae"}}, ["needs a critic's values"]),
        ({"group_size": 1}, ["group_size 1", "advantage.kind=reinforce_plus_plus"]),
        ({"rollout": {"sampling": {"top_p": 0.9}}}, ["rollout.sampling.top_p 0.9", "loss.old_logprobs=trainer"]),
        ({"rollout": {"sampling": {"top_k": 20, "min_p": 0.1}}}, ["top_k 20 and", "min_p 0.1"]),
        ({"trainer": {"optimizer": {"betas": [0.9, 1.0]}}}, ["1.0", "less than 1"]),
        ({"rollout": {"sampling": {"temperature": 0}}}, ["rollout.sampling.temperature 0", "above 0"]),
        (
            {"placement": {"colocate": "all"}, "rollout": {"max_staleness": 1}},
            ["with placement.colocate engines sleep", "rollout.max_staleness 1"],
        ),
    ],
)
def test_fields_that_contradict_each_other_are_refused(changes: dict[str, Any], words: list[str]) -> None:
    text = " ".join(problems(grpo(**changes)).values())
    for word in words:
        assert word in text


@pytest.mark.parametrize(
    ("sampling", "extra", "words"),
    [
        ({"temperature": 2.5}, {}, ["vLLM refuses rollout.sampling.temperature 2.5", "set it to at most 2"]),
        ({"temperature": float("inf")}, {}, ["temperature inf", "rollout.engine.kind=builtin"]),
        ({}, {"tensor_parallel_size": 2}, ["a field of its own: set rollout.engine.tensor_parallel_size"]),
        ({}, {"max_model_len": 64}, ["set model.max_length"]),
        ({}, {"logprobs_mode": "raw_logprobs"}, ["training needs the log-probabilities", "leave it out"]),
        ({}, {"async_scheduling": True}, ["async_scheduling True", "which weights made a token"]),
        ({}, {"pipeline_parallel_size": 2}, ["pipeline_parallel_size 2", "rollout.engine.count"]),
    ],
)
def test_vllm_settings_are_refused_early(sampling: dict[str, Any], extra: dict[str, Any], words: list[str]) -> None:
    asked = {"engine": {"kind": "vllm", "extra": extra}, "sampling": sampling}
    text = " ".join(problems(grpo(rollout=asked)).values())
    for word in words:
        assert word in text
    if sampling:
        evaluated = {"data": {"path": "e"}, "sampling": sampling}
        text = " ".join(problems(grpo(rollout={"engine": {"kind": "vllm"}}, evaluation=evaluated)).values())
        assert "evaluation.sampling.temperature" in text


def test_other_vllm_settings_are_passed_on() -> None:
    extra = {"block_size": 64, "async_scheduling": False, "pipeline_parallel_size": 1, "quantization": "fp8"}
    engine = {"kind": "vllm", "extra": extra}
    assert check_config(grpo(rollout={"engine": engine, "sampling": {"temperature": 2.0}}), "test")
    assert check_config(grpo(rollout={"sampling": {"temperature": 2.5}}), "test"), "the builtin engine takes it"


def test_policy_loss_defaults_to_ppo() -> None:
    found = check_config(grpo(loss={"clip_high": 0.28}), "test").loss
    assert (found.kind, found.clip_high) == ("ppo_clip", 0.28)
    gspo = check_config(apply_overrides(grpo(), ["loss.kind=gspo", "loss.clip_low=1e-3"]), "test").loss
    assert (gspo.kind, gspo.clip_low, gspo.aggregation) == ("gspo", 1e-3, "seq-mean-token-mean")
    assert check_config(grpo(group_size=1, advantage={"kind": "reinforce_plus_plus"}), "test").group_size == 1


def test_an_invalid_term_is_the_only_thing_reported() -> None:
    found = problems(grpo(reward={"terms": [{"kind": "regex", "pattern": "("}]}))
    assert list(found) == ["reward.terms.0.pattern"]


def test_the_recipe_must_be_known() -> None:
    assert "'pppo' is unknown" in problems({"recipe": "pppo"})["recipe"]
    assert "sft, grpo" in problems({})["recipe"]


def test_overrides_set_nested_values_and_items_of_lists() -> None:
    values = apply_overrides(
        grpo(), ["trainer.optimizer.lr=1e-5", "reward.terms.0.weight=2", "rollout.sampling.stop=[a, b]", "name=y"]
    )
    config = check_config(values, "test")
    assert config.trainer.optimizer.lr == 1e-5
    assert config.reward is not None
    assert config.reward.terms[0].weight == 2
    assert config.rollout.sampling.stop == ("a", "b")
    assert config.name == "y"


@pytest.mark.parametrize(
    "override", ["steps", "=3", "reward.terms.7.weight=1", "name.first=x", "steps=[1"], ids=lambda text: text
)
def test_overrides_of_unknown_fields_are_refused(override: str) -> None:
    with pytest.raises(ConfigError):
        check_config(apply_overrides(grpo(), [override]), "test")


def test_overrides_change_a_part_of_settings_that_are_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text('{"zero_optimization": {"stage": 2, "overlap_comm": true}}')
    values = grpo() | {"trainer": {"kind": "deepspeed", "deepspeed": str(file)}}
    changed = apply_overrides(values, ["trainer.deepspeed.zero_optimization.stage=3"])
    assert changed["trainer"]["deepspeed"] == {"zero_optimization": {"stage": 3, "overlap_comm": True}}
    missing = grpo() | {"trainer": {"kind": "deepspeed", "deepspeed": "missing.json"}}
    with pytest.raises(ConfigError, match=r"trainer\.deepspeed: missing\.json cannot be read"):
        apply_overrides(missing, ["trainer.deepspeed.zero_optimization.stage=3"])


def test_overrides_leave_the_given_mapping_alone() -> None:
    values = grpo()
    apply_overrides(values, ["model.path=other"])
    assert values["model"]["path"] == "m"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "an empty file"),
        ("- a\n- b", "found list"),
        ("a: [1", "line 1"),
        ("steps: 1\nsteps: 2", "'steps' is given twice"),
    ],
)
def test_a_file_that_is_no_mapping_is_refused(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "x.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"x\.yaml") as caught:
        read_yaml(file)
    assert words in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml"):
        load_config(tmp_path / "nowhere.yaml")


def test_yaml_numbers_in_scientific_notation_are_numbers(tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    file.write_text(yaml.safe_dump(grpo()) + "trainer: {optimizer: {lr: 1e-4}}\n")
    assert load_config(file).trainer.optimizer.lr == 1e-4


def test_copies_must_divide_the_ranks_and_be_sharded() -> None:
    for ranks, replicas in ((4, 3), (4, 4), (2, 2)):
        with pytest.raises(ConfigError, match=f"replicas {replicas} must divide ranks {ranks}"):
            check_config(grpo(trainer={"ranks": ranks, "replicas": replicas}), "test")
    assert check_config(grpo(trainer={"ranks": 8, "replicas": 2}), "test").trainer.shards == 4


def test_exports() -> None:
    adapter = {"model": {"path": "m", "adapter": {"kind": "dora"}}}
    for extra, export, folders in (
        ({}, True, ["export"]),
        ({}, "merged", ["export"]),
        ({}, False, []),
        (adapter, True, ["export", "adapter"]),
        (adapter, "adapter", ["adapter"]),
        (adapter, "merged", ["export"]),
    ):
        exports = check_config(grpo(**extra, checkpoint={"export": export}), "test").exports
        assert [each.folder for each in exports] == folders
    with pytest.raises(ConfigError, match=r"checkpoint\.export 'adapter' needs an adapter"):
        check_config(grpo(checkpoint={"export": "adapter"}), "test")


def test_off_is_not_read_as_false() -> None:
    values = yaml.safe_load("{trainer: {compile: off}, loss: {importance: {kind: off}}}")
    assert values["trainer"]["compile"] is False
    config = check_config(grpo(**values), "test")
    assert isinstance(config, GRPOConfig)
    assert config.trainer.compile == "off" and config.loss.importance.kind == "off"


@pytest.mark.parametrize("ports", [[80, 90], [20000, 20001], [20010, 20000], [65000, 65536]], ids=str)
def test_unusable_ports_are_refused(ports: list[int]) -> None:
    said = problems(grpo(cluster={"kind": "ray", "ports": ports}))["cluster.ports"]
    assert "the first and last of at least 3 ports" in said and str(ports) in said


def test_ports_for_a_run() -> None:
    for ports in ([20000, 20099], [65533, 65535]):
        cluster = check_config(grpo(cluster={"kind": "ray", "ports": ports}), "test").cluster
        assert cluster.kind == "ray" and cluster.ports == tuple(ports)
