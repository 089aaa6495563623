"""Every family of models trains on two ranks as transformers computes it, and is exported as transformers saves it."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import model_families as mf
import numpy as np
import pytest
import torch
import trainer_ranks as tr
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from lockstep.config.model import ModelConfig
from lockstep.config.rollout import BuiltinEngineConfig
from lockstep.models.hf_checkpoint import named_state
from lockstep.models.policy_model import PolicyModel
from lockstep.rollout.builtin.engine import BuiltinEngine
from lockstep.rollout.builtin.model_runner import CachedRunner
from lockstep.rollout.engine_protocol import Request

QUICK = ("mixtral", "gpt-oss")
FAMILIES = [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in mf.FAMILIES]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_trains_on_two_ranks_and_is_exported(family: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    folder = mf.make_family(tmp_path / "model", family)
    found = tr.launch(tmp_path, 2, ["sft", "grpo"], mf.__name__)
    saved = {name: tensor.shape for name, tensor in load_file(folder / "model.safetensors").items()}
    for recipe, results in found.items():
        truth = tr.truth(tmp_path, tr.config(tmp_path, "model", recipe), 1)
        assert results[0].metrics == results[1].metrics
        assert results[0].metrics[0]["loss"] == pytest.approx(truth.metrics[0]["loss"], rel=1e-5)
        gradient, expected = tr.assemble([r.gradient for r in results]), tr.assemble([truth.gradient])
        assert gradient.keys() == expected.keys()
        for name, value in expected.items():
            assert float((gradient[name] - value).norm()) < 1e-4 * float(value.norm()) + 1e-6, name
        exported = tmp_path / f"exported-{recipe}"
        assert {n: t.shape for n, t in load_file(exported / "model.safetensors").items()} == saved
        lm = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
        weights = tr.assemble([r.weights for r in results])
        assert weights.keys() == dict(lm.named_parameters()).keys()
        for name, parameter in lm.named_parameters():
            assert torch.equal(parameter, weights[name]), name
    engine = BuiltinEngine.from_config(
        ModelConfig(path=str(folder), max_length=256), BuiltinEngineConfig(), reader=lambda *_: nullcontext(weights)
    )
    engine.load_weights(tmp_path, 1)
    assert_serves(engine, lm)
    facts = [
        results[0].extra["mode"],
        "fused" if results[0].extra["fused"] else "own",
        "fused" if not engine.slower else "cached" if isinstance(engine._runner, CachedRunner) else "whole sequences",
        "as in the module" if saved.keys() == dict(named_state(PolicyModel(lm))).keys() else "converted",
    ]
    assert mf.documented()[family][:4] == facts


def test_the_table_of_the_page_names_every_family() -> None:
    assert sorted(mf.documented()) == sorted(mf.FAMILIES)


def assert_serves(engine: BuiltinEngine, lm: Any) -> None:
    """The engine's log-probabilities are those of transformers' own forward, beyond the windows of the layers."""
    prompts = [np.arange(10, 10 + length, dtype=np.int32) for length in (5, 20)]
    engine.submit([Request(f"{g}-{k}", str(g), prompts[g], seed=k, max_tokens=12) for g in range(2) for k in range(2)])
    done = []
    while len(done) < 4:
        done += engine.step()
    for each in done:
        prompt = prompts[int(each.request[0])]
        tokens = torch.from_numpy(np.concatenate([prompt, each.tokens]).astype(np.int64))
        with torch.no_grad():
            expected = lm.eval()(tokens[None]).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        expected = expected.gather(-1, tokens[len(prompt) :, None])[:, 0]
        torch.testing.assert_close(torch.from_numpy(each.logprobs), expected, rtol=0, atol=1e-4)
