"""Every family of models trains on two ranks as transformers computes it, and is exported as transformers saves it."""

from pathlib import Path

import model_families as mf
import pytest
import torch
import trainer_ranks as tr
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

QUICK = ("mixtral",)
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
