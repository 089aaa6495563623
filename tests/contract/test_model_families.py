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
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from lockstep.config.algorithm import BradleyTerry
from lockstep.config.model import ModelConfig
from lockstep.config.rollout import BuiltinEngineConfig
from lockstep.config.train_role import TrainRole
from lockstep.config.trainer import TrainerConfig
from lockstep.data.forest_builder import forest_of_scored_pairs
from lockstep.data.mini_batches import pack
from lockstep.data.samples import Pair
from lockstep.models.hf_checkpoint import named_state
from lockstep.models.policy_model import PolicyModel
from lockstep.rollout.builtin.engine import BuiltinEngine
from lockstep.rollout.builtin.model_runner import CachedRunner
from lockstep.rollout.engine_protocol import Request
from lockstep.train.distributed import ParallelContext
from lockstep.train.fsdp.fsdp_trainer import FSDP2Trainer

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


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_scores_texts_as_transformers_does(family: str, tmp_path: Path) -> None:
    """Before and after a step of the reward recipe's objective, and from the export."""
    if family in mf.WITHOUT_SCORES:
        pytest.skip("transformers has no such class")
    folder, tokens = mf.make_scorer(tmp_path / "model", family), np.arange(10, 22, dtype=np.int32)
    role = TrainRole(
        name="policy",
        model=ModelConfig(path=str(folder), head="score", max_length=256),
        trainer=TrainerConfig(threads=1),
        objective=BradleyTerry(),
        optimizer_steps=1,
    )
    trainer = FSDP2Trainer(role, ParallelContext())
    pair = Pair("0", 0, tokens[:4], tokens[4:9], tokens[6:12])
    mode = trainer.probe_packing().mode
    batch = pack(forest_of_scored_pairs([pair]), 1, 64, mode, whole_trees=True)
    (rows,) = batch.everything().by_rank
    whole = [np.concatenate([pair.prompt, side]).astype(np.int64) for side in (pair.chosen, pair.rejected)]

    def expected(path: Path) -> list[float]:
        lm = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32).eval()
        with torch.no_grad():
            return [lm(torch.from_numpy(text)[None]).logits.item() for text in whole]

    def found() -> list[float]:
        scores = np.zeros(batch.targets)
        for row, values in zip(rows, trainer.evaluate(rows, ["scores"]), strict=True):
            scores[batch.sequences[row.index]] = values["scores"]
        return scores.tolist()

    before = found()
    assert before == pytest.approx(expected(folder), abs=2e-5)
    (minibatch,) = batch.minibatches(objective=role.objective)
    if mode == "forest":
        trainer.step(minibatch.by_rank[0])
        assert found() != before
    trainer.export(tmp_path / "exported")
    assert found() == pytest.approx(expected(tmp_path / "exported"), abs=2e-5)


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
