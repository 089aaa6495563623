"""Refusals before a run starts or resumes."""

import json
from pathlib import Path
from typing import Any, Literal

import pytest
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from lockstep.config.loader import apply_overrides, check_config
from lockstep.config.model import ModelConfig
from lockstep.config.recipes import RECIPES, SFTConfig
from lockstep.config.section import Section
from lockstep.config.train_role import TrainRole
from lockstep.config.trainer import TrainerConfig
from lockstep.data.dataset_rows import DataError
from lockstep.ledger.ledger import Ledger
from lockstep.models.errors import ModelError
from lockstep.models.model_loader import load_policy
from lockstep.models.tiny_model import make_tiny
from lockstep.models.vision.tiny_vision import make_tiny_vision
from lockstep.run.errors import RunRefused
from lockstep.run.planning.prepare import PreparedRun, prepare_run
from lockstep.run.planning.working_folder import START_EVENT


def write(data: Path, rows: int) -> None:
    lines = [json.dumps({"prompt": f"{n % 10}=", "completion": "1"}) for n in range(rows)]
    data.write_text("\n".join(lines) + "\n")


def prepared(folder: Path) -> tuple[Path, PreparedRun]:
    """A run of 20 rows, and the file that has them."""
    make_tiny(folder / "model", hidden=16, layers=1, heads=2, kv_heads=1, ffn=32, max_length=32, alphabet="0123456789=")
    data = folder / "data.jsonl"
    write(data, 20)
    values: dict[str, Any] = {
        "recipe": "sft", "name": "x", "folder": str(folder), "steps": 4, "batch_size": 4,
        "model": {"path": str(folder / "model")}, "data": {"path": str(data)}, "cluster": {"device": "cpu"},
    }  # fmt: skip
    return data, prepare_run(check_config(values, "test"), None)


def test_a_run_is_not_resumed_with_another_number_of_rows(tmp_path: Path) -> None:
    data, fresh = prepared(tmp_path)
    assert fresh.rows == 20
    with Ledger.create(fresh.folder, fresh.config.model_dump(mode="json")) as ledger:
        ledger.record_event(START_EVENT, rows=fresh.rows)
    assert prepare_run(None, fresh.folder).rows == 20
    for rows in (19, 21):
        write(data, rows)
        with pytest.raises(RunRefused, match=rf"had 20 rows to use .* and has {rows} now"):
            prepare_run(None, fresh.folder)


def test_a_run_is_not_resumed_with_other_rows(tmp_path: Path) -> None:
    data, fresh = prepared(tmp_path)
    with Ledger.create(fresh.folder, fresh.config.model_dump(mode="json")) as ledger:
        ledger.record_event(START_EVENT, rows=20, row_counts=[20])  # of an earlier version
        ledger.record_event(START_EVENT, rows=20, row_counts=[20], row_digests=fresh.row_digests)
        ledger.record_event(START_EVENT, rows=20, row_counts=[20], row_digests=["of no resumed run"])
    whole = data.read_text()
    assert prepare_run(None, fresh.folder).row_digests == fresh.row_digests
    data.write_text(whole.replace("7=", "8=", 1))
    with pytest.raises(RunRefused, match=r"data\.jsonl had other rows when .* began, as many as now: restore the data"):
        prepare_run(None, fresh.folder)
    data.write_text(whole)
    prepare_run(None, fresh.folder)


def test_an_overlong_prompt_of_evaluation_that_was_not_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lockstep.data.row_lengths.MEASURED_FIRST", 2)
    make_tiny(
        tmp_path / "model", hidden=16, layers=1, heads=2, kv_heads=1, ffn=32, max_length=32, alphabet="0123456789="
    )
    write(tmp_path / "data.jsonl", 20)
    prompts = [{"prompt": "1" * (30 if n == 1 else 2), "answer": "1"} for n in range(4)]
    (tmp_path / "e.jsonl").write_text("\n".join(map(json.dumps, prompts)))
    held_out = {"path": str(tmp_path / "e.jsonl"), "measure": "used", "overlong": "drop"}
    values: dict[str, Any] = {
        "recipe": "sft", "name": "x", "folder": str(tmp_path), "steps": 4, "batch_size": 4,
        "model": {"path": str(tmp_path / "model")}, "data": {"path": str(tmp_path / "data.jsonl")},
        "cluster": {"device": "cpu"}, "evaluation": {"data": held_out},
        "rollout": {"sampling": {"max_tokens": 8}},
        "reward": {"terms": [{"kind": "exact_match"}]},
    }  # fmt: skip
    with pytest.raises(DataError, match=r"evaluation is 1 prompt short.* set evaluation\.data\.measure to all"):
        prepare_run(check_config(values, "test"), None)
    held_out["measure"] = "all"
    assert len(prepare_run(check_config(values, "test"), None).data.held_out) == 3


def test_what_text_alone_does_not_train_of_a_model_that_sees(tmp_path: Path) -> None:
    make_tiny_vision(tmp_path / "model", family="qwen3_vl", max_length=64)
    write(tmp_path / "data.jsonl", 8)

    def prepared(model: dict[str, Any]) -> PreparedRun:
        values: dict[str, Any] = {
            "recipe": "sft", "name": "x", "folder": str(tmp_path), "steps": 1, "batch_size": 4,
            "model": {"path": str(tmp_path / "model"), **model}, "data": {"path": str(tmp_path / "data.jsonl")},
            "cluster": {"device": "cpu"}, "trainer": {"ranks": 2},
        }  # fmt: skip
        return prepare_run(check_config(values, "test"), None)

    (note,) = (each for each in prepared({}).notes if "no images" in each)
    assert "never called and stay as they are" in note and "model.vision.tower.train=false" in note
    frozen = {"tower": {"train": False}, "projector": {"train": False}}
    assert not any("no images" in each for each in prepared({"vision": frozen}).notes)
    with pytest.raises(ModelError, match=r"^model\.vision\.language\.train = False: the data has no images, .*; train"):
        prepared({"vision": {"language": {"train": False}}})
    with pytest.raises(ModelError, match=r"^model\.adapter\.target_modules = \('qkv',\): the data has no images"):
        prepared({"adapter": {"r": 2, "target_modules": ["qkv"]}})


def test_a_mixture_is_described_and_not_resumed_with_other_rows_of_one_dataset(tmp_path: Path) -> None:
    make_tiny(
        tmp_path / "model", hidden=16, layers=1, heads=2, kv_heads=1, ffn=32, max_length=32, alphabet="0123456789="
    )
    files = {"sums": 20, "products": 10}
    for name, rows in files.items():
        write(tmp_path / f"{name}.jsonl", rows)
    mixture = [{"path": str(tmp_path / f"{name}.jsonl"), "weight": 2 - index} for index, name in enumerate(files)]
    values: dict[str, Any] = {
        "recipe": "sft", "name": "x", "folder": str(tmp_path), "steps": 4, "batch_size": 4,
        "model": {"path": str(tmp_path / "model")}, "data": {"mixture": mixture}, "cluster": {"device": "cpu"},
        "validation": {"fraction": 0.1},
    }  # fmt: skip
    config = check_config(values, "test")
    fresh = prepare_run(config, None)
    shares = "data is a mixture: sums 18 rows (66.7% of the samples), products 9 rows (33.3% of the samples)"
    assert shares in fresh.notes and (fresh.rows, fresh.row_counts) == (27, [18, 9])
    assert [document.row for document in fresh.data.validation if document.row >= 20]
    with Ledger.create(fresh.folder, config.model_dump(mode="json")) as ledger:
        ledger.record_event(START_EVENT, rows=fresh.rows, row_counts=fresh.row_counts)
    assert prepare_run(None, fresh.folder).row_counts == [18, 9]
    with pytest.raises(RunRefused, match=r"data\.mixture\.1\.weight: 1\.0 -> 3"):
        other = [mixture[0], mixture[1] | {"weight": 3}]
        prepare_run(check_config(values | {"data": {"mixture": other}}, "test"), fresh.folder)
    # The same total, in another order.
    write(tmp_path / "sums.jsonl", 19)
    write(tmp_path / "products.jsonl", 11)
    with pytest.raises(RunRefused, match=r"sums\.jsonl had 18 rows to use .* and has 17 now"):
        prepare_run(None, fresh.folder)


def test_groups_are_filtered_by_an_existing_term(tmp_path: Path) -> None:
    make_tiny(
        tmp_path / "model", hidden=16, layers=1, heads=2, kv_heads=1, ffn=32, max_length=32, alphabet="0123456789="
    )
    (tmp_path / "data.jsonl").write_text('{"prompt": "1=", "answer": "1"}\n')
    values: dict[str, Any] = {
        "recipe": "grpo", "name": "x", "folder": str(tmp_path), "steps": 4, "cluster": {"device": "cpu"},
        "model": {"path": str(tmp_path / "model")}, "data": {"path": str(tmp_path / "data.jsonl")},
        "rollout": {"sampling": {"max_tokens": 4}}, "token_budget": 64,
        "reward": {"terms": [{"kind": "exact_match", "name": "right"}]},
    }  # fmt: skip
    for metric in ("reward", "right"):
        prepare_run(check_config(values | {"filter_groups": {"enable": True, "metric": metric}}, "test"), None)
    wrong = values | {"filter_groups": {"enable": True, "metric": "exact_match"}}
    with pytest.raises(RunRefused, match=r"filter_groups.metric 'exact_match' is not one of reward, right"):
        prepare_run(check_config(wrong, "test"), None)


class ValueModel(Section):
    model: ModelConfig
    trainer: TrainerConfig = TrainerConfig()


class CriticConfig(SFTConfig):
    """Fine-tuning with a second trained model."""

    recipe: Literal["with_critic"]  # type: ignore[assignment]
    critic: ValueModel

    @property
    def train_roles(self) -> tuple[TrainRole, ...]:
        changes = {"name": "critic", "model": self.critic.model, "trainer": self.critic.trainer}
        return self.policy, self.policy.model_copy(update=changes)

    @property
    def exported_roles(self) -> tuple[str, ...]:
        return "policy", "critic"


@pytest.fixture
def values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A run of two trained models, the second of which starts from an adapter."""
    monkeypatch.setitem(RECIPES, "with_critic", CriticConfig)
    shape: dict[str, Any] = {"layers": 1, "heads": 2, "kv_heads": 1, "ffn": 32, "max_length": 32}
    make_tiny(tmp_path / "model", hidden=16, **shape, alphabet="0123456789=")
    make_tiny(tmp_path / "value", hidden=32, **shape, alphabet="0123456789=")
    write(tmp_path / "data.jsonl", 20)
    policy = load_policy(ModelConfig(path=str(tmp_path / "value")), "cpu")
    get_peft_model(policy.lm, LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"])).save_pretrained(
        tmp_path / "adapter"
    )
    critic = {"model": {"path": str(tmp_path / "value"), "adapter": {"path": str(tmp_path / "adapter")}}}
    return {
        "recipe": "with_critic", "name": "x", "folder": str(tmp_path), "steps": 4, "batch_size": 4, "critic": critic,
        "model": {"path": str(tmp_path / "model")}, "data": {"path": str(tmp_path / "data.jsonl")},
        "cluster": {"device": "cpu"},
    }  # fmt: skip


def test_the_adapter_of_another_role_is_recorded_with_its_settings(values: dict[str, Any]) -> None:
    prepared = prepare_run(check_config(values, "test"), None)
    adapter = prepared.config.train_roles[1].model.adapter
    assert adapter is not None and (adapter.r, adapter.lora_alpha, adapter.target_modules) == (4, 8, ("q_proj",))
    assert prepared.config.model_dump()["critic"]["model"]["adapter"]["r"] == 4
    found = prepared.other_models["critic"].adapter
    assert found is not None and found.trained < prepared.other_models["critic"].parameters
    assert [each.folder for each in prepared.config.exports] == ["export", "critic/export", "critic/adapter"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model.adapter.path": "nowhere"}, r"^critic\.model\.adapter\.path = 'nowhere'"),
        ({"model.adapter.r": 8}, r"^critic\.model\.adapter\.r = 8: the adapter in .* has 4"),
        ({"model.path": "MODEL"}, r"^critic\.model\.adapter\.path = .*set critic\.model\.path to the model it was"),
        ({"model.path": "nowhere"}, r"^critic\.model\.path = 'nowhere'"),
        ({"model.quantization.kind": "int8"}, r"^critic\.model\.quantization\.kind = 'int8'"),
    ],
)
def test_a_model_of_another_role_that_cannot_be_trained_is_refused(
    values: dict[str, Any], tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    overrides = [f"critic.{name}={tmp_path / 'model' if value == 'MODEL' else value}" for name, value in change.items()]
    with pytest.raises(ValueError, match=words):
        prepare_run(check_config(apply_overrides(values, overrides), "test"), None)
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("alphabet", "words"),
    [
        ("01", r"embeddings for \d+ tokens, and the tokenizer of"),
        ("=9876543210", r"its tokenizer differs .*in \d+ tokens"),
    ],
    ids=["fewer", "other ids"],
)
def test_other_roles_have_the_tokens_of_the_policys_tokenizer(
    values: dict[str, Any], tmp_path: Path, alphabet: str, words: str
) -> None:
    """With fewer tokens there is no embedding for some; with other ids a critic would read other texts."""
    small = {"hidden": 16, "layers": 1, "heads": 2, "kv_heads": 1, "ffn": 32, "max_length": 32}
    make_tiny(tmp_path / "other", **small, alphabet=alphabet)
    values["critic"] = {"model": {"path": str(tmp_path / "other")}}
    with pytest.raises(ModelError, match=rf"^critic\.model\.path = .*{words}"):
        prepare_run(check_config(values, "test"), None)


def test_a_critic_does_not_start_from_a_reward_model_with_other_tokens(tmp_path: Path) -> None:
    """That reward model may give the rewards all the same."""
    small = {"hidden": 16, "layers": 1, "heads": 2, "kv_heads": 1, "ffn": 32, "max_length": 32}
    for name, alphabet in (("policy", "0123456789="), ("other", "=9876543210")):
        make_tiny(tmp_path / name, **small, alphabet=alphabet)
    lm = AutoModelForSequenceClassification.from_pretrained(tmp_path / "other", num_labels=1)
    lm.save_pretrained(tmp_path / "scorer")
    AutoTokenizer.from_pretrained(tmp_path / "other").save_pretrained(tmp_path / "scorer")
    write(tmp_path / "data.jsonl", 20)
    values: dict[str, Any] = {
        "recipe": "ppo", "name": "x", "folder": str(tmp_path), "steps": 2, "prompts_per_step": 4, "token_budget": 64,
        "model": {"path": str(tmp_path / "policy")}, "data": {"path": str(tmp_path / "data.jsonl")},
        "reward": {"terms": [{"kind": "model", "path": str(tmp_path / "scorer")}]}, "cluster": {"device": "cpu"},
        "rollout": {"sampling": {"max_tokens": 8}},
    }  # fmt: skip
    refused = r"^critic\.model = .*its tokenizer differs .*such as the policy's \(critic\.model=policy\)$"
    with pytest.raises(ModelError, match=refused):
        prepare_run(check_config({**values, "critic": {"model": "reward_model"}}, "test"), None)
    lm.save_pretrained(tmp_path / "bare")  # without a tokenizer, which the term names
    bare = {"kind": "model", "path": str(tmp_path / "bare"), "tokenizer": str(tmp_path / "scorer")}
    with pytest.raises(ModelError, match=refused):
        prepare_run(
            check_config({**values, "critic": {"model": "reward_model"}, "reward": {"terms": [bare]}}, "x"), None
        )
    assert prepare_run(check_config(values, "test"), None).rows == 20
