"""Compiled layers compute the same as uncompiled ones."""

from pathlib import Path

import numpy as np
import pytest
import torch

from lockstep.config.recipes import SFTConfig
from lockstep.data.forest_builder import forest_from_documents
from lockstep.data.mini_batches import pack
from lockstep.data.samples import Document
from lockstep.models.tiny_model import make_tiny
from lockstep.train import decoder_layers
from lockstep.train.decoder_layers import CompilerMissing, require_compiler
from lockstep.train.distributed import ParallelContext
from lockstep.train.fsdp.fsdp_trainer import FSDP2Trainer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("speed") / "model", hidden=32, ffn=48)


def config(folder: Path, **trainer: object) -> SFTConfig:
    common = {"recipe": "sft", "name": "speed", "steps": 4, "data": {"path": "unused.jsonl"}}
    settings = {"optimizer": {"lr": 1e-3, "eps": 1e-5}, **trainer}
    return SFTConfig.model_validate({**common, "model": {"path": str(folder)}, "trainer": settings})


def train(cfg: SFTConfig) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Takes two steps on rows of different lengths, one of them empty."""
    trainer = FSDP2Trainer(cfg.policy, ParallelContext())
    draw = np.random.default_rng(1)
    losses = []
    for sizes in ((9, 12, 5), (17, 4)):
        documents = [
            Document(f"0:{i}", i, draw.integers(10, 60, size).astype(np.int32), np.arange(size) > 0)
            for i, size in enumerate(sizes)
        ]
        (minibatch,) = pack(forest_from_documents(documents), 4, 32).minibatches(objective=cfg.loss)
        rows = [row for rank in minibatch.by_rank for row in rank]
        assert any(row.tokens.size == 1 for row in rows)
        losses.append(trainer.step(rows).values["loss"])
    return losses, {name: parameter.detach().clone() for name, parameter in trainer.trained_parameters.items()}


@pytest.mark.slow
def test_compiled_layers_compute_the_same(folder: Path) -> None:
    """Tests compilation together with recomputation, which wraps the compiled forward."""
    torch.set_num_threads(1)
    plain_losses, plain = train(config(folder))
    losses, compiled = train(config(folder, compile="layers", activation_checkpointing=True))
    assert losses == pytest.approx(plain_losses, rel=1e-5)
    for name, weight in compiled.items():
        # AdamW with this eps turns rounding of tiny gradients into at most some thousandths of a step.
        torch.testing.assert_close(weight, plain[name], rtol=1e-5, atol=2e-6, msg=name)


def test_known_layers_are_fused(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "lockstep"):
        trainer = FSDP2Trainer(config(folder).policy, ParallelContext())
    assert trainer.policy.fused_decoder is not None and trainer.policy.fused_decoder.enabled
    assert "a fused forward, which agrees with the model's own" in caplog.text


def test_a_missing_compiler_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder_layers.shutil, "which", lambda name: None)
    with pytest.raises(CompilerMissing, match=r"install g\+\+, or set trainer.compile: off"):
        require_compiler()


def test_off_may_be_a_yaml_boolean(folder: Path) -> None:
    assert config(folder, compile=False).trainer.compile == "off"
