"""The builtin engine loads a streamed version completely or not at all."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, str(Path(__file__).parent))
from stream_endpoints import Feeder

from lockstep.models.tiny_model import make_tiny
from lockstep.rollout.builtin import BuiltinEngine
from lockstep.rollout.engine_protocol import Request
from lockstep.rollout.errors import WeightsMismatch
from lockstep.weights.errors import LinkFailed


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("streams") / "model", hidden=64, heads=4, kv_heads=2, ffn=128)


def changed(folder: Path) -> torch.nn.Module:
    lm = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        for parameter in lm.parameters():
            parameter.add_(0.25)
    return lm


def engine_of(folder: Path) -> BuiltinEngine:
    lm = AutoModelForCausalLM.from_pretrained(folder)
    return BuiltinEngine(lm, AutoTokenizer.from_pretrained(folder), max_length=64)


def same(engine: BuiltinEngine, lm: torch.nn.Module) -> bool:
    mine = dict(engine.lm.named_parameters())
    return all(torch.equal(mine[name], each) for name, each in lm.named_parameters())


def test_a_version_is_loaded_between_two_tokens(folder: Path, tmp_path: Path) -> None:
    engine, feeder = engine_of(folder), Feeder(tmp_path)
    engine.submit([Request("r", "g", np.arange(4, 9, dtype=np.int32), seed=1, max_tokens=6, ignore_eos=True)])
    engine.step()
    new = changed(folder)
    feeder.give(engine, new, 3)
    assert same(engine, new) and engine.version == 3
    done = []
    while not done:
        done = engine.step()
    assert set(done[0].versions.tolist()) == {0, 3}
    old = AutoModelForCausalLM.from_pretrained(folder)
    feeder.give(engine, old, 4)
    assert same(engine, old)
    engine.close()


def test_an_incomplete_version_changes_nothing(folder: Path, tmp_path: Path) -> None:
    engine, before = engine_of(folder), AutoModelForCausalLM.from_pretrained(folder)
    with pytest.raises(LinkFailed, match="the trainer rank on this GPU"):
        Feeder(tmp_path, limit_s=1.0).give(engine, changed(folder), 3, until=2)
    assert same(engine, before) and engine.version == 0


def test_other_tensors_are_refused_before_a_communicator_is_formed(folder: Path, tmp_path: Path) -> None:
    engine = engine_of(folder)
    with pytest.raises(WeightsMismatch, match=r"somewhere\.weight"):
        Feeder(tmp_path, limit_s=1.0).give(engine, torch.nn.ModuleDict({"somewhere": torch.nn.Linear(2, 2)}), 3)
    assert engine.version == 0
