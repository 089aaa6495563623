"""Which checkpoint an export takes."""

import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from lockstep.config.loader import check_config
from lockstep.ledger.sqlite_index import CheckpointRow
from lockstep.models.tiny_model import make_tiny
from lockstep.run.errors import RunRefused
from lockstep.run.planning.parent_run import choose_checkpoint
from lockstep.run.trained_models.checkpoint_export import _role_on_one_rank, export_from_one_rank
from lockstep.train.distributed import ParallelContext
from lockstep.train.fsdp.fsdp_trainer import FSDP2Trainer

ROWS = [CheckpointRow(step, Path(f"{step + 1:08d}"), metric, 0.0) for step, metric in ((2, 0.5), (5, 0.7), (7, 0.7))]


@pytest.mark.parametrize(("step", "expected"), [("last", 7), ("best", 7), ("3", 2), ("6", 5)])
def test_a_checkpoint_is_named_by_its_steps_or_its_rank(step: str, expected: int) -> None:
    assert choose_checkpoint(ROWS, step).step == expected


def test_what_is_missing_is_named() -> None:
    with pytest.raises(RunRefused, match="after 3, 6, 8 steps"):
        choose_checkpoint(ROWS, "5")
    with pytest.raises(RunRefused, match="no complete checkpoint yet"):
        choose_checkpoint([], "last")
    with pytest.raises(RunRefused, match="no checkpoint was evaluated"):
        choose_checkpoint([CheckpointRow(0, Path("1"), None, 0.0)], "best")


def test_a_checkpoint_of_deepspeed_is_exported_without_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All kinds of trainers write one format (the trainer contract), so that FSDP2 stands in for the writer here."""
    make_tiny(tmp_path / "model", hidden=32, layers=1, heads=2, kv_heads=2, ffn=32, seed=3)
    config = check_config(
        {
            "recipe": "sft", "name": "a", "steps": 3, "data": {"path": "d.jsonl"},
            "model": {"path": str(tmp_path / "model"), "dtype": "float32"},
            "trainer": {"kind": "deepspeed", "deepspeed": {"zero_optimization": {"stage": 3}}, "ranks": 2},
        },
        "run.yaml",
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    role = _role_on_one_rank(config, None)
    trainer = FSDP2Trainer(role, ParallelContext(device=torch.device("cpu")))
    with torch.no_grad():
        trainer.policy.head.weight.fill_(0.5)
    trainer.save(tmp_path / "saved")
    trainer.close()
    export_from_one_rank(role, tmp_path / "out", tmp_path / "saved")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert bool((exported.lm_head.weight == 0.5).all())
