"""The policy equals transformers' forward of each separate sequence."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lockstep.data.row_layout import RowLayout
from lockstep.models import logprob_head
from lockstep.models.policy_model import hf_name, policy_name

LENGTHS = [6, 3, 1, 5, 4, 2, 7]
PARENTS = [-1, 0, 0, 0, -1, 4, 5]
"""A prompt with three completions; then a chain of turns."""


@dataclass
class Row:
    tokens: Tensor
    layout: RowLayout
    sources: Tensor
    targets: Tensor
    paths: list[tuple[Tensor, Tensor]]
    """Returns (sequence from its root, predicted positions) for each segment with targets."""


def make_row(vocabulary: int = 90, seed: int = 0, lengths=LENGTHS, parents=PARENTS) -> Row:
    generator = torch.Generator().manual_seed(seed)
    layout = RowLayout(lengths, parents)
    tokens = torch.randint(0, vocabulary, (layout.tokens,), generator=generator)
    sources, targets, paths = [], [], []
    for segment, (start, stop, parent) in enumerate(layout.segments()):
        if parent < 0:
            continue
        last = layout.starts[parent] + layout.lengths[parent] - 1
        sources += [last, *range(start, stop - 1)]
        targets += tokens[start:stop].tolist()
        above = [
            tokens[layout.starts[a] : layout.starts[a] + layout.lengths[a]] for a in layout.ancestors(segment)[::-1]
        ]
        sequence = torch.cat([*above, tokens[start:stop]])
        paths.append((sequence, torch.arange(len(sequence) - (stop - start), len(sequence))))
    return Row(tokens, layout, torch.tensor(sources), torch.tensor(targets), paths)


def separate(hf, row: Row, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Computes log-probabilities and entropies by transformers, with one forward per segment."""
    logprobs, entropies = [], []
    for sequence, places in row.paths:
        every = (hf(sequence[None]).logits[0].float() / temperature).log_softmax(-1)
        logprobs.append(every[places - 1].gather(-1, sequence[places, None])[:, 0])
        entropies.append(torch.distributions.Categorical(logits=every[places - 1]).entropy())
    return torch.cat(logprobs), torch.cat(entropies)


def padded(hf, row: Row) -> Tensor:
    """Computes the same with one padded batch and an attention mask."""
    longest = max(len(sequence) for sequence, _ in row.paths)
    batch = torch.zeros(len(row.paths), longest, dtype=torch.int64)
    mask = torch.zeros_like(batch)
    for place, (sequence, _) in enumerate(row.paths):
        batch[place, : len(sequence)], mask[place, : len(sequence)] = sequence, 1
    every = hf(batch, attention_mask=mask).logits.log_softmax(-1)
    return torch.cat(
        [
            every[i, places - 1].gather(-1, sequence[places, None])[:, 0]
            for i, (sequence, places) in enumerate(row.paths)
        ]
    )


def unshared(row: Row) -> Row:
    """Returns the same sequences as separate documents, with repeated prompts."""
    lengths = [len(sequence) for sequence, _ in row.paths]
    layout = RowLayout(lengths, [-1] * len(lengths))
    sources = [start + places - 1 for start, (_, places) in zip(layout.starts, row.paths, strict=True)]
    return Row(torch.cat([s for s, _ in row.paths]), layout, torch.cat(sources), row.targets, row.paths)


def gradients(module) -> dict[str, Tensor]:
    return {name.removeprefix("lm."): p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


def assert_same_gradients(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys() and one
    for name, gradient in one.items():
        error = (gradient - other[name]).norm() / other[name].norm().clamp_min(1e-12)
        # The gradient of a key's bias is zero in exact arithmetic (softmax sees no shift): only rounding is left of it.
        assert error < 1e-5 or name.endswith("k_proj.bias"), (name, error)


def loss_weights(count: int) -> Tensor:
    return torch.linspace(-1, 2, count)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("chunk", [1024, 5, 1])
def test_logprobs_and_entropy_equal_separate_forwards(policy, hf, monkeypatch, temperature: float, chunk: int) -> None:
    monkeypatch.setattr(logprob_head, "DIRECT_ELEMENTS", 0 if chunk < 1024 else logprob_head.DIRECT_ELEMENTS)
    row = make_row()
    logprobs, entropies = policy(row.tokens, row.layout, row.sources, row.targets, temperature, chunk, entropy=True)
    expected, expected_entropies = separate(hf, row, temperature)
    assert logprobs.dtype == torch.float32 and expected.std() > 0.5
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(entropies, expected_entropies, rtol=0, atol=1e-5)


def test_packed_padded_and_shared_agree(policy, hf) -> None:
    row = make_row(seed=1)
    shared, _ = policy(row.tokens, row.layout, row.sources, row.targets)
    again = unshared(row)
    repeated, _ = policy(again.tokens, again.layout, again.sources, again.targets)
    torch.testing.assert_close(shared, repeated, rtol=0, atol=1e-5)
    torch.testing.assert_close(shared, padded(hf, row), rtol=0, atol=1e-5)


@pytest.mark.parametrize("chunk", [1024, 4])
def test_gradients_equal_separate_forwards(policy, hf, monkeypatch, chunk: int) -> None:
    monkeypatch.setattr(logprob_head, "DIRECT_ELEMENTS", 0 if chunk < 1024 else logprob_head.DIRECT_ELEMENTS)
    row = make_row(seed=2)
    weights = loss_weights(len(row.targets))
    expected, entropies = separate(hf, row, 0.8)
    ((expected * weights).sum() + 0.3 * (entropies * weights.flip(0)).sum()).backward()
    for variant in (row, unshared(row)):
        policy.zero_grad()
        logprobs, found = policy(
            variant.tokens, variant.layout, variant.sources, variant.targets, 0.8, chunk, entropy=True
        )
        ((logprobs * weights).sum() + 0.3 * (found * weights.flip(0)).sum()).backward()
        assert_same_gradients(gradients(policy), gradients(hf))


def test_gradients_with_activation_checkpointing(policy, hf) -> None:
    row = make_row(seed=4)
    (separate(hf, row)[0] * loss_weights(len(row.targets))).sum().backward()
    for layer in policy.layers:
        plain = layer.forward
        layer.forward = lambda *args, _plain=plain, **kwargs: checkpoint(_plain, *args, use_reentrant=False, **kwargs)
    logprobs, _ = policy(row.tokens, row.layout, row.sources, row.targets)
    (logprobs * loss_weights(len(row.targets))).sum().backward()
    assert_same_gradients(gradients(policy), gradients(hf))


def test_an_empty_microbatch_is_one_token_of_weight_zero(policy) -> None:
    one = torch.zeros(1, dtype=torch.int64)
    logprobs, _ = policy(one, RowLayout([1], [-1]), one, one)
    (logprobs * 0.0).sum().backward()
    found = gradients(policy)
    assert len(found) == len(list(policy.parameters()))
    assert all(torch.equal(gradient, torch.zeros_like(gradient)) for gradient in found.values())


def test_a_long_row_is_attended_to_in_pieces(policy, hf) -> None:
    """With more than 256 tokens, the row is divided into several pieces; one of them is larger than 256 tokens."""
    lengths = [40, 60, 60] * 2 + [100, 20] + [30] * 5
    parents = [-1, 0, 0, -1, 3, 3, -1, 6, -1, 8, -1, 10, -1]
    row = make_row(seed=5, lengths=lengths, parents=parents)
    assert len(row.layout.parts()) > 1
    expected, _ = separate(hf, row)
    torch.testing.assert_close(policy(row.tokens, row.layout, row.sources, row.targets)[0], expected, rtol=0, atol=2e-5)


def test_names_round_trip(policy, hf) -> None:
    ours = [name for name, _ in policy.named_parameters()]
    assert [hf_name(name) for name in ours] == [name for name, _ in hf.named_parameters()]
    assert [policy_name(hf_name(name)) for name in ours] == ours
    wrapped = "lm.model.layers.0.self_attn.q_proj.base_layer.weight"
    assert hf_name(wrapped) == "model.layers.0.self_attn.q_proj.weight"
    with pytest.raises(ValueError, match="begin with"):
        hf_name("model.norm.weight")


def test_parts_of_the_policy(policy) -> None:
    assert [type(layer).__name__ for layer in policy.layers] == [type(policy.layers[0]).__name__] * 2
    assert policy.head.weight.shape == (policy.config.vocab_size, policy.config.hidden_size)
    inside = {id(p) for p in policy.backbone.parameters()} | {id(p) for p in policy.head.parameters()}
    assert inside == {id(p) for p in policy.parameters()}


def test_bad_calls_are_refused(policy) -> None:
    row = make_row()
    with pytest.raises(ValueError, match="temperature"):
        policy(row.tokens, row.layout, row.sources, row.targets, temperature=0.0)
    with pytest.raises(ValueError, match="layout of 28 tokens"):
        policy(row.tokens[:-1], row.layout, row.sources, row.targets)
