"""Runs that train an adapter: killed and resumed bitwise, exported in both forms, refused if the adapter does not
fit."""

from pathlib import Path

import numpy as np
import pytest
from harness import Launched, config, task, train, weights, write
from peft import PeftModel
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from lockstep.cli import app
from lockstep.ledger.ledger import Ledger

ADAPTER = {"kind": "dora", "r": 4, "lora_alpha": 16, "lora_dropout": 0.1, "modules_to_save": ["embed_tokens"]}
LOSS = {"old_logprobs": "trainer", "kl": {"coefficient": 0.05}}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return task(tmp_path_factory.mktemp("adapter"))


def values(home: Path, **changes: object) -> dict[str, object]:
    made = config(home, "grpo", steps=4, checkpoint={"every": 2}, loss=LOSS, **changes)
    return made | {"model": {"path": str(home / "model"), "adapter": ADAPTER}, "evaluation": None}


@pytest.mark.timeout(300)
def test_a_run_trains_an_adapter_and_exports_it_twice(home: Path, tmp_path: Path) -> None:
    made = values(home, folder=str(tmp_path / "runs")) | {"steps": 2}
    run = train(home, made)
    _check_exports(home, run)
    exported = CliRunner().invoke(app, ["export", str(run), str(tmp_path / "again"), "--adapter"])
    assert exported.exit_code == 0, exported.output
    name = "adapter_model.safetensors"
    assert (tmp_path / "again" / name).read_bytes() == (run / "adapter" / name).read_bytes()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_killed_run_ends_with_the_same_adapter(home: Path, tmp_path: Path) -> None:
    straight = train(home, values(home, folder=str(tmp_path / "straight")))
    killed = values(home, folder=str(tmp_path / "killed"))
    folder = tmp_path / "killed" / "grpo"
    first = Launched.start(folder, str(write(tmp_path, killed)))
    first.wait_for("train", 3)
    first.kill()
    assert Launched.resume(folder).finish() == 0
    assert weights(folder) == weights(straight), "merged"
    name = "adapter/adapter_model.safetensors"
    assert (folder / name).read_bytes() == (straight / name).read_bytes()
    with Ledger.reader(folder) as ledger:
        assert {row.generation for row in ledger.commits()} == {1, 2}
    _check_exports(home, straight)
    _check_as_start_of_another_run(home, straight, tmp_path)


def _check_as_start_of_another_run(home: Path, begun: Path, tmp_path: Path) -> None:
    made = values(home, folder=str(tmp_path / "further")) | {"steps": 1}
    made["model"] = {"path": str(home / "model"), "adapter": {"path": str(begun / "adapter"), "lora_dropout": 0.0}}
    with Ledger.reader(train(home, made)) as ledger:
        adapter = ledger.config()["model"]["adapter"]
        first = next(row.values for row in ledger.metrics_rows() if "policy/kl" in row.values)
    assert (adapter["kind"], adapter["r"], adapter["modules_to_save"]) == ("dora", 4, ["embed_tokens", "lm_head"])
    assert abs(first["policy/kl"]) < 1e-6, "the initial adapter is the reference"
    assert first["policy/engine_gap_max"] < 1e-4


def _check_exports(home: Path, run: Path) -> None:
    before, after = load_file(home / "model" / "model.safetensors"), load_file(run / "export" / "model.safetensors")
    adapted = [name for name in after if "_proj.weight" in name or "embed_tokens" in name]
    for name, weight in after.items():
        moved = float(np.abs(weight - before[name]).max())
        assert moved > 1e-4 if name in adapted else moved == 0, name
    base = AutoModelForCausalLM.from_pretrained(home / "model")
    merged = PeftModel.from_pretrained(base, run / "adapter").merge_and_unload()  # type: ignore[operator]
    for name, weight in merged.named_parameters():
        name = name.replace("lm_head", "model.embed_tokens")  # peft unties them
        assert np.abs(weight.detach().numpy() - after[name]).max() < 1e-6, name
    with Ledger.reader(run) as ledger:
        rows = [row.values for row in ledger.metrics_rows() if "policy/kl" in row.values]
    gaps, divergence = [row["policy/engine_gap_max"] for row in rows], [row["policy/kl"] for row in rows]
    assert max(gaps) < 1e-4, "the engine serves the merged weights"
    assert divergence[-1] > divergence[0] >= 0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("model.adapter.target_modules=[q_prj]", ["model.adapter.target_modules", "'q_prj'", "did you mean q_proj"]),
        # no bitsandbytes, or no GPU
        ("model.quantization.kind=nf4 trainer.ranks=1", ["model.quantization.kind = 'nf4'"]),
        ("model.adapter.r=0", ["model.adapter.r"]),
        ("model.adapter.path=nowhere/adapter", ["model.adapter.path = 'nowhere/adapter'"]),
        ("model.adapter.modules_to_save=[lm_haed]", ["model.adapter.modules_to_save", "did you mean lm_head"]),
        ("model.adapter.rank=8", ["model.adapter.rank", "'model.adapter.r'"]),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused(home: Path, tmp_path: Path, change: str, words: list[str]) -> None:
    made = values(home, folder=str(tmp_path / "runs"))
    folder = tmp_path / "runs" / "grpo"
    refused = Launched.start(folder, str(write(tmp_path, made)), *change.split(), "cluster.device=cpu")
    assert refused.finish() == 2, refused.text()
    for word in words:
        assert word in refused.printed().replace("\n", " "), word
    assert not folder.exists()
