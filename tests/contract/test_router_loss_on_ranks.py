"""The routers' auxiliary loss on two ranks is the one that transformers computes."""

from pathlib import Path

import model_families as mf
import pytest
import torch
import trainer_ranks as tr
from transformers import AutoModelForCausalLM
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func


@pytest.mark.parametrize("family", ["mixtral", pytest.param("gpt-oss", marks=pytest.mark.slow)])
def test_two_ranks_add_the_auxiliary_loss_that_transformers_computes(family: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    folder = mf.make_family(tmp_path / "model", family)
    found = tr.launch(tmp_path, 2, ["router", "router-recomputed"], mf.__name__)
    lm = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    losses, auxiliary, targets = [], [], []
    for document in tr.documents():
        tokens = torch.from_numpy(document.tokens).long()
        output = lm(tokens[None], output_router_logits=True)
        learned = torch.from_numpy(document.loss_mask[1:])
        logprobs = output.logits[0, :-1].log_softmax(-1).gather(-1, tokens[1:, None])[:, 0]
        losses.append(-logprobs[learned].sum())
        auxiliary.append(load_balancing_loss_func(output.router_logits, 4, 2))
        targets.append(int(learned.sum()))
    shares = torch.tensor(targets) / sum(targets)
    expected = mf.ROUTER_LOSS * (torch.stack(auxiliary) * shares).sum()
    loss = torch.stack(losses).sum() / sum(targets) + expected
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(lm.parameters(), 0.5)
    for results in found.values():
        metrics = results[0].metrics[0]
        assert metrics["router_aux_loss"] == pytest.approx(float(expected.detach()), rel=1e-5)
        assert metrics["loss"] == pytest.approx(float(loss.detach()), rel=1e-5)
        assert metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-5)
        gradient = tr.assemble([result.gradient for result in results])
        for name, parameter in lm.named_parameters():
            assert parameter.grad is not None
            assert float((gradient[name] - parameter.grad).norm()) < 1e-4 * float(parameter.grad.norm()) + 1e-6, name
