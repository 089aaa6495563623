"""The chunked head: its gradients and memory, and how the transform of logits is found."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    BertConfig,
    BertLMHeadModel,
    Cohere2Config,
    Cohere2ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
)

from lockstep.data.row_layout import RowLayout
from lockstep.models import logprob_head
from lockstep.models.errors import ModelError
from lockstep.models.logprob_head import LogitTransform, split_head, target_logprobs, target_renyi_entropies
from lockstep.models.policy_model import PolicyModel

SIZES = {
    "vocab_size": 40,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 1,
}
TRANSFORMS = [LogitTransform(), LogitTransform(0.25), LogitTransform(softcap=3.0), LogitTransform(2.0, softcap=2.5)]


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("entropy", [False, True])
def test_written_out_gradient_equals_autograd(
    monkeypatch, transform: LogitTransform, bias: bool, entropy: bool
) -> None:
    """Compares the explicit gradient with that of autograd, with chunks that do not divide the targets."""
    generator = torch.Generator().manual_seed(1)
    hidden, weight, offset = (
        torch.randn(*shape, generator=generator).requires_grad_() for shape in ((7, 5), (11, 5), (11,))
    )
    inputs = [hidden, weight, *([offset] if bias else [])]
    targets = torch.randint(0, 11, (7,), generator=generator)
    grads = torch.randn(2, 7, generator=generator)

    def values(logprobs: torch.Tensor, found: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        loss = (logprobs * grads[0]).sum()
        if found is not None:
            loss = loss + (found * grads[1]).sum()
        return logprobs.detach(), loss.detach(), *torch.autograd.grad(loss, inputs)

    def run(kept: int, chunk: int) -> tuple[torch.Tensor, ...]:
        monkeypatch.setattr(logprob_head, "DIRECT_ELEMENTS", kept)
        return values(
            *target_logprobs(hidden, weight, offset if bias else None, targets, transform, 0.7, chunk, entropy)
        )

    every = torch.log_softmax(transform(hidden @ weight.t() + (offset if bias else 0)) / 0.7, -1)
    plain = values(every[torch.arange(7), targets], -(every.exp() * every).sum(-1) if entropy else None)
    for kept, chunk in ((10**9, 1024), (0, 1), (0, 3), (0, 7), (0, 100)):
        for one, other in zip(run(kept, chunk), plain, strict=True):
            assert (one - other).norm() <= 1e-5 * other.norm()


@pytest.mark.parametrize("bias", [False, True])
def test_the_order_in_which_gradients_arrive_is_the_same_for_all_rows(monkeypatch, bias: bool) -> None:
    """Ranks that put gradients into buckets as they arrive (ZeRO) would otherwise add those of different parameters."""
    monkeypatch.setattr(logprob_head, "DIRECT_ELEMENTS", 50)
    head = torch.nn.Linear(5, 11, bias=bias)
    arrived: list[str] = []
    for name, parameter in head.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: arrived.append(name))
    orders = []
    for count in (1, 40):
        logprobs, _ = target_logprobs(
            torch.randn(count, 5, requires_grad=True), head.weight, head.bias, torch.zeros(count, dtype=torch.int64),
            LogitTransform(),
        )  # fmt: skip
        logprobs.sum().backward()
        orders.append(arrived.copy())
        arrived.clear()
    assert orders[0] == orders[1]
    assert sorted(orders[0]) == sorted(dict(head.named_parameters()))


def test_only_required_gradients_are_computed(monkeypatch) -> None:
    monkeypatch.setattr(logprob_head, "DIRECT_ELEMENTS", 0)
    hidden, weight = torch.randn(4, 3, requires_grad=True), torch.randn(6, 3)
    logprobs, _ = target_logprobs(hidden, weight, None, torch.arange(4), LogitTransform(), chunk=2)
    logprobs.sum().backward()
    assert hidden.grad is not None and weight.grad is None


class Largest(TorchDispatchMode):
    """Records the number of elements of the largest tensor that an operation returned."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, tuple | list) else [out]:
            if isinstance(value, torch.Tensor):
                self.elements = max(self.elements, value.numel())
        return out


@pytest.mark.parametrize("entropy", [False, True])
def test_no_tensor_of_targets_by_vocabulary(entropy: bool) -> None:
    targets, vocabulary, size, chunk = 512, 4096, 8, 32
    hidden = torch.randn(targets, size, requires_grad=True)
    weight = torch.randn(vocabulary, size, requires_grad=True)
    with Largest() as chunked:
        logprobs, found = target_logprobs(
            hidden,
            weight,
            None,
            torch.zeros(targets, dtype=torch.int64),
            LogitTransform(),
            chunk=chunk,
            entropy=entropy,
        )
        (logprobs.sum() + (found.sum() if found is not None else 0)).backward()
    assert chunked.elements == max(chunk, size) * vocabulary
    with Largest() as whole:  # the measure does see a full logits tensor
        (hidden @ weight.t()).log_softmax(-1).sum().backward()
    assert whole.elements == targets * vocabulary


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_renyi_entropies_are_their_formula(transform: LogitTransform, chunk: int) -> None:
    generator = torch.Generator().manual_seed(2)
    hidden, weight, bias = (torch.randn(*shape, generator=generator) for shape in ((7, 5), (11, 5), (11,)))
    probabilities = torch.softmax(transform(hidden @ weight.t() + bias).double() / 0.7, -1)
    found = target_renyi_entropies(hidden, weight, bias, transform, 0.7, chunk)
    assert torch.allclose(found.double(), -torch.log(probabilities.square().sum(-1)), atol=1e-6)
    with Largest() as largest:
        target_renyi_entropies(torch.randn(512, 8), torch.randn(4096, 8), None, transform, chunk=chunk)
    assert largest.elements <= max(chunk, 8) * 4096


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_weights(monkeypatch, dtype: torch.dtype) -> None:
    monkeypatch.setattr(logprob_head, "DIRECT_ELEMENTS", 0)
    hidden, weight = torch.randn(64, 16), torch.randn(50, 16)
    targets = torch.arange(50).repeat(2)[:64]
    low = [value.to(dtype).requires_grad_() for value in (hidden, weight)]
    exact = [value.detach().float().requires_grad_() for value in low]
    for inputs, chunk in ((low, 4), (exact, 64)):
        logprobs, _ = target_logprobs(*inputs, None, targets, LogitTransform(), chunk=chunk)
        assert logprobs.dtype == torch.float32
        logprobs.mean().backward()
    for one, other in zip(low, exact, strict=True):
        assert one.grad.dtype == dtype
        assert (one.grad.float() - other.grad).norm() / other.grad.norm() < 0.02


MODELS = [
    (Gemma2ForCausalLM, Gemma2Config(**SIZES, head_dim=8, final_logit_softcapping=5.0), LogitTransform(1.0, 5.0)),
    (Cohere2ForCausalLM, Cohere2Config(**SIZES, logit_scale=0.125), LogitTransform(0.125)),
    (GraniteForCausalLM, GraniteConfig(**SIZES, logits_scaling=4.0), LogitTransform(0.25)),
    (GPT2LMHeadModel, GPT2Config(vocab_size=40, n_embd=32, n_layer=2, n_head=4, n_positions=64), LogitTransform()),
]


@pytest.mark.parametrize(("kind", "config", "transform"), MODELS, ids=lambda value: getattr(value, "__name__", ""))
def test_scaled_and_capped_heads(kind, config, transform: LogitTransform) -> None:
    torch.manual_seed(0)
    lm = kind(config).eval()
    with torch.no_grad():
        for parameter in lm.parameters():
            parameter.mul_(5)
    forward, names = lm.forward, list(lm.state_dict())
    policy = PolicyModel(lm)
    assert policy.transform == transform
    assert lm.forward == forward and list(lm.state_dict()) == names  # the proof leaves no trace
    tokens = torch.randint(2, 40, (12,))
    logprobs, _ = policy(tokens, RowLayout([12], [-1]), torch.arange(11), tokens[1:])
    expected = lm(tokens[None]).logits[0].float().log_softmax(-1)[:-1].gather(-1, tokens[1:, None])[:, 0]
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=1e-5)


def test_the_check_needs_no_weights() -> None:
    with torch.device("meta"):
        lm = Gemma2ForCausalLM(Gemma2Config(**SIZES, head_dim=8, final_logit_softcapping=5.0))
    assert split_head(lm) == ("model", LogitTransform(1.0, 5.0))


def test_an_unknown_head_is_refused() -> None:
    """BERT has a dense layer and a norm between its hidden states and the matrix of its head."""
    config = BertConfig(
        vocab_size=40, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=32, is_decoder=True
    )
    with pytest.raises(ModelError, match=r"BertLMHeadModel.*linear map"):
        PolicyModel(BertLMHeadModel(config))
