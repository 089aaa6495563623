"""Runs whose reference log-probabilities are computed once: the same results, kept over kills, and found stale."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from harness import ALPHABET, Launched, config, train, weights, write, write_picture
from safetensors.numpy import load_file
from test_recovery import kill_worker, recoveries

from lockstep.ledger.ledger import Ledger
from lockstep.models.tiny_model import make_tiny
from lockstep.models.vision.tiny_vision import make_tiny_vision

pytestmark = [pytest.mark.xdist_group("preference"), pytest.mark.timeout(400)]

STEPS, BATCH = 4, 6
HOLD = {"stage": "reference", "seconds": 0.5}


def write_pairs(home: Path, count: int, other: str = "0") -> None:
    rows = []
    for n in range(count):
        number = f"{(7919 * n) % 10 ** (2 + n % 4):02d}1"
        rows.append({"prompt": f"{number}=", "chosen": number, "rejected": number[::-1] + other * (n % 3)})
    (home / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_model(home: Path, seed: int) -> None:
    shutil.rmtree(home / "model", ignore_errors=True)
    make_tiny(
        home / "model", hidden=32, layers=2, heads=2, kv_heads=1, ffn=64, max_length=32, alphabet=ALPHABET, seed=seed
    )


@pytest.fixture
def home(tmp_path: Path) -> Path:
    make_model(tmp_path, seed=5)
    write_pairs(tmp_path, 20)
    return tmp_path


def settings(home: Path, name: str, **changes: Any) -> dict[str, Any]:
    values = config(home, "preference", name=name, steps=STEPS, evaluation=None, batch_size=BATCH)
    del values["rollout"]
    values["data"] = {"path": str(home / "pairs.jsonl")}
    values["trainer"] = {"ranks": 1, "threads": 1, "optimizer": {"lr": 3e-3}}
    return {**values, **changes}


def losses(run: Path) -> list[float]:
    with Ledger.reader(run) as ledger:
        return [row.values["policy/loss"] for row in ledger.metrics_rows()]


@pytest.mark.parametrize(
    "loss",
    [
        {"type": ["sigmoid", "nll"], "ld_alpha": None},
        pytest.param({"type": "sigmoid", "ld_alpha": 0.3}, marks=pytest.mark.slow),
        pytest.param({"type": "aot"}, marks=pytest.mark.slow),
    ],
)
def test_results_are_those_of_a_reference_in_memory(home: Path, loss: dict[str, Any]) -> None:
    """In two epochs of shuffled data, of which the second begins within a step."""
    plain = train(home, settings(home, "plain", loss=loss))
    trainer = {"ranks": 2, "threads": 1, "optimizer": {"lr": 3e-3}}
    once = train(home, settings(home, "once", loss=loss, precompute_ref_log_probs=True, trainer=trainer))
    assert losses(once) == pytest.approx(losses(plain), rel=1e-6)
    expected, found = (load_file(run / "export/model.safetensors") for run in (plain, once))
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, abs=1e-5), name


@pytest.mark.slow
def test_an_adapter_and_labels(home: Path) -> None:
    model = {"path": str(home / "model"), "adapter": {"kind": "lora", "r": 4}}
    plain, once = (
        train(home, settings(home, f"adapter-{flag}", model=model, precompute_ref_log_probs=flag))
        for flag in (False, True)
    )
    assert losses(once) == pytest.approx(losses(plain), rel=1e-6)
    rows = [json.loads(line) for line in (home / "pairs.jsonl").read_text().splitlines()]
    labelled = [{"prompt": row["prompt"], "completion": row["rejected"], "label": n % 2} for n, row in enumerate(rows)]
    (home / "labelled.jsonl").write_text("".join(json.dumps(row) + "\n" for row in labelled))
    changes: dict[str, Any] = {
        "loss": {"type": "apo_zero_unpaired"}, "data": {"path": str(home / "labelled.jsonl")},
    }  # fmt: skip
    plain, once = (
        train(home, settings(home, f"labels-{flag}", precompute_ref_log_probs=flag, **changes))
        for flag in (False, True)
    )
    assert losses(once) == pytest.approx(losses(plain), rel=1e-6)


@pytest.mark.slow
def test_images_are_kept_in_their_room(home: Path) -> None:
    """Those of a chunk are needed until it is computed, and no longer."""
    make_tiny_vision(home / "vision", family="qwen3_vl", max_length=64)
    rows = []
    for n in range(24):
        write_picture(home / f"{n}.png", seed=n)
        rows.append({"prompt": "what?", "chosen": f"{n}", "rejected": "no", "image": f"{n}.png"})
    (home / "pictures.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    changes = {
        "model": {"path": str(home / "vision"), "vision": {"store_gb": 1e-5}}, "token_budget": 256,
        "data": {"path": str(home / "pictures.jsonl")},
    }  # fmt: skip
    plain, once = (
        train(home, settings(home, f"vision-{flag}", batch_size=2, precompute_ref_log_probs=flag, **changes))
        for flag in (False, True)
    )
    assert losses(once) == pytest.approx(losses(plain), rel=1e-6)
    kept = [len(list((run / "images").rglob("*.safetensors"))) for run in (plain, once)]
    assert kept == [2, 2], "of 24 prepared images, those of the last step"


@pytest.mark.slow
def test_a_kill_loses_no_chunk_and_changes_nothing(home: Path) -> None:
    write_pairs(home, 600)
    values = settings(home, "whole", precompute_ref_log_probs=True, checkpoint={"every": 1})
    whole = train(home, values)
    run = home / "runs/killed"
    file = write(home, {**values, "name": "killed"})
    launched = Launched.start(run, str(file), hold=HOLD)
    launched.wait_for_file(run / "reference", "00000001.safetensors")
    launched.kill()
    stored = sorted((run / "reference").glob("*.safetensors"))
    assert len(stored) == 2, "killed while the others were computed"
    before = stored[0].stat().st_mtime_ns
    resumed = Launched.resume(run)
    assert resumed.finish() == 0, resumed.text()
    assert stored[0].stat().st_mtime_ns == before, "the first chunk was kept"
    assert weights(run) == weights(whole) and losses(run) == losses(whole)


@pytest.mark.slow
def test_a_rank_that_is_killed_meanwhile_is_restarted_and_nothing_is_lost(home: Path) -> None:
    """It is killed in the evaluation of the third chunk, and both ranks start again."""
    write_pairs(home, 900)
    trainer = {"ranks": 2, "threads": 1, "optimizer": {"lr": 3e-3}}
    values = settings(home, "whole", precompute_ref_log_probs=True, trainer=trainer)
    whole = train(home, values)
    run = home / "runs/killed"
    launched = Launched.start(run, str(write(home, {**values, "name": "killed"})), hold=HOLD)
    launched.wait_for_file(run / "reference", "00000001.safetensors")
    before = {path.name: path.stat().st_mtime_ns for path in (run / "reference").glob("*.safetensors")}
    assert len(before) == 2, "killed while the others were computed"
    kill_worker(launched, "policy-1", seconds=1.0)  # stopped for so long that it is in the next evaluation
    assert launched.finish() == 0, launched.text()
    (restarted,) = recoveries(run)
    assert (restarted["worker"], restarted["step"], restarted["restored"]) == ("policy-1", 0, 0)
    after = {path.name: path.stat().st_mtime_ns for path in (run / "reference").glob("*.safetensors")}
    assert len(after) == 4 and before.items() <= after.items(), "the first chunks were kept"
    assert weights(run) == weights(whole) and losses(run) == losses(whole)


@pytest.mark.slow
def test_changed_data_and_another_model_are_noticed(home: Path) -> None:
    """Before the first step all is computed again with another model; later that is impossible."""
    values = settings(home, "stale", precompute_ref_log_probs=True, checkpoint={"every": 1})
    run, file = home / "runs/stale", write(home, values)
    launched = Launched.start(run, str(file), hold={"stage": "train", "seconds": 5.0})
    launched.wait_for("train", None)
    launched.kill()
    write_pairs(home, 20, other="1")
    refused = Launched.resume(run)
    assert refused.finish() != 0
    assert "had other rows when" in " ".join(refused.text().split())
    write_pairs(home, 20)
    make_model(home, seed=6)
    again = Launched.resume(run, hold={"stage": "train", "seconds": 0.5})
    again.wait_for("train", 2)
    again.kill()
    assert "belong to other data or to another model: computing them again" in again.text()
    make_model(home, seed=7)
    refused = Launched.resume(run)
    assert refused.finish() != 0
    assert "belong to other data or to another model, and the policy has been trained" in " ".join(
        refused.text().split()
    )
    make_model(home, seed=6)
    restored = Launched.resume(run)
    assert restored.finish() == 0, restored.text()
    assert losses(run) == losses(train(home, {**values, "name": "fresh"}))
