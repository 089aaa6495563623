"""The card that the hub shows for a run's model."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from report_helpers import CONFIG

from lockstep.ledger import Ledger
from lockstep.report.model_card import METHOD_PAPERS, model_card
from lockstep.report.run_summary import PARENT_EVENT

SECRET = "hf_" + "Zk3QpV7xLw9TbN2mRd5YcJ8sHg4FaE6u"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache with what was loaded from the hub."""
    for name in ("models--Qwen--Qwen2.5-0.5B", "datasets--openai--gsm8k"):
        (tmp_path / "hub" / name).mkdir(parents=True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))


def card_of(tmp_path: Path, steps: int = 2, files: tuple[str, ...] = (), **changes: Any) -> str:
    folder = tmp_path / "export"
    folder.mkdir()
    for name in files:
        (folder / name).touch()
    with Ledger.create(tmp_path / "run", {**CONFIG, **changes}) as ledger:
        ledger.record_evaluation(-1, {"eval/exact_match": 0.25}, [])
        for step in range(3):
            ledger.record_metrics(step, {"tokens/total": 1500.0 * (step + 1), "time/step_s": 2.0, "time/train_s": 1.5})
            ledger.record_evaluation(step, {"eval/exact_match": 0.5 + step / 10, "eval/reward_mean": 0.75}, [])
            ledger.commit(step, {})
        if "parent" in changes:
            ledger.record_event(PARENT_EVENT, **changes["parent"])
        return model_card(ledger, folder, steps, "mira/sorter")


def metadata_of(card: str) -> dict[str, Any]:
    loaded = yaml.safe_load(card.split("---\n")[1])
    assert isinstance(loaded, dict)
    return loaded


def test_the_hub_reads_base_model_data_method_and_results(tmp_path: Path) -> None:
    card = card_of(
        tmp_path,
        model={"path": "Qwen/Qwen2.5-0.5B"},
        data={"path": "openai/gsm8k", "split": "train"},
        evaluation={"data": {"path": "openai/gsm8k", "split": "test"}},
        advantage={"kind": "dr_grpo"},
        loss={"kind": "gspo"},
    )
    found = metadata_of(card)
    assert found["base_model"] == "Qwen/Qwen2.5-0.5B" and found["datasets"] == ["openai/gsm8k"]
    assert found["tags"] == ["lockstep", "grpo", "arxiv:2503.20783", "arxiv:2507.18071"]
    (entry,) = found["model-index"]
    (result,) = entry["results"]
    assert result["dataset"]["type"] == "openai/gsm8k"
    # After two steps, so of the evaluation of step 1; the third step is not part of this model.
    assert {each["type"]: each["value"] for each in result["metrics"]} == {"exact_match": 0.6, "reward_mean": 0.75}
    assert "| `eval/exact_match` | 0.25 | 0.6 |" in card and "| `eval/reward_mean` |  | 0.75 |" in card
    assert "| tokens | 3,000 |" in card and "| completions per step | 256 (32 prompts, 8 each) |" in card
    assert "[Qwen/Qwen2.5-0.5B](https://huggingface.co/Qwen/Qwen2.5-0.5B), after 2 steps of GRPO" in card


def test_it_says_how_to_load_what_the_folder_has(tmp_path: Path) -> None:
    card = card_of(tmp_path, files=("adapter_config.json", "chat_template.jinja"))
    code = card.split("```python\n")[1].split("```")[0]
    compile(code, "card", "exec")
    assert 'AutoPeftModelForCausalLM.from_pretrained("mira/sorter")' in code and "apply_chat_template" in code
    assert metadata_of(card)["library_name"] == "peft"


def test_it_names_no_secret_folder_or_host(tmp_path: Path) -> None:
    card = card_of(
        tmp_path,
        model={"path": "/home/ada/models/tiny"},
        data={"path": "/home/ada/data/sums.jsonl", "system": "```yaml\nhi\n```"},
        reward={
            "terms": [
                {
                    "kind": "remote",
                    "url": "https://u:pw4Judge9x@judge.intern:8000/score",
                    "headers": {"api_key": SECRET},
                },
                {"kind": "function", "path": "~/rewards/mine.py:score"},
            ]
        },
        cluster={"kind": "hosts", "hosts": ["gpu-17.cluster"]},
        parent={"run": "/home/ada/runs/warm-up", "steps": 1, "optimizer": True, "changes": []},
    )
    for hidden in (
        "/home/ada",
        "~/rewards",
        SECRET,
        "gpu-17",
        "pw4Judge9x",
        "judge.intern",
        "10.0.0.5",
        "/srv",
        "acme",
    ):
        assert hidden not in card, hidden
    assert "base_model" not in metadata_of(card) and "`tiny`" in card and "The run started from `warm-up`" in card
    shown = yaml.safe_load(card.split("````yaml\n")[1].split("\n````")[0])
    assert shown["data"]["path"] == "sums.jsonl" and "cluster" not in shown and "folder" not in shown


@pytest.mark.parametrize("section", ["advantage", "loss"])
def test_every_method_of_the_config_has_its_paper(section: str) -> None:
    from lockstep.config import algorithm

    union = {"advantage": "Advantage", "loss": "AnyPolicyLoss"}[section]
    kinds = {each.model_fields["kind"].default for each in algorithm.__dict__[union].__origin__.__args__}
    assert kinds <= METHOD_PAPERS.keys()


def test_runs_on_pairs_name_their_loss(tmp_path: Path) -> None:
    loss = {"kind": "preference", "type": ["simpo", "sft"], "beta": 2.0}
    card = card_of(tmp_path, recipe="preference", loss=loss, batch_size=64, group_size=None, prompts_per_step=None)
    assert "after 2 steps of SimPO with Lockstep" in card and "arxiv:2405.14734" in metadata_of(card)["tags"]


def test_a_folder_that_is_not_here_is_no_model_on_the_hub(tmp_path: Path) -> None:
    card = card_of(tmp_path, model={"path": "models/client"}, data={"path": "data/pairs"})
    assert not {"base_model", "datasets"} & metadata_of(card).keys() and "models/client" not in card


def test_recipes_that_choose_completions_name_their_papers(tmp_path: Path) -> None:
    card = card_of(tmp_path, recipe="online_dpo", advantage=None, loss={"kind": "preference", "type": ["sigmoid"]})
    assert metadata_of(card)["tags"] == ["lockstep", "online_dpo", "arxiv:2402.04792", "arxiv:2305.18290"]
    assert "online DPO" in card
