"""Importance weights against numbers worked out by hand."""

import math

import pytest
import torch

from lockstep.algos.importance_sampling import logprob_gap, mask_ratios, sequence_ratios, token_ratios, truncate_ratios

ENGINE = torch.log(torch.tensor([0.5, 0.5, 0.5, 1e-9]))
TRAINER = torch.log(torch.tensor([0.5, 0.25, 0.9, 0.9]))


def test_tokens_are_truncated_at_the_cap() -> None:
    correction = truncate_ratios(token_ratios(TRAINER.clone().requires_grad_(), ENGINE), cap=1.5)
    torch.testing.assert_close(correction.weights, torch.tensor([1.0, 0.5, 1.5, 1.5]))
    assert correction.cut.tolist() == [False, False, True, True]
    torch.testing.assert_close(correction.raw[:3], torch.tensor([1.0, 0.5, 1.8]))
    assert not correction.weights.requires_grad


def test_tokens_outside_of_the_bounds_are_masked() -> None:
    correction = mask_ratios(token_ratios(TRAINER, ENGINE), cap=2.0, floor=0.6)
    torch.testing.assert_close(correction.weights, torch.tensor([1.0, 0.0, 1.8, 0.0]))
    assert correction.cut.tolist() == [False, True, False, True]
    torch.testing.assert_close(
        mask_ratios(token_ratios(TRAINER, ENGINE), 1.7).weights, torch.tensor([1.0, 0.5, 0.0, 0.0])
    )


def test_a_sequence_has_the_product_of_its_tokens_ratios() -> None:
    trainer = torch.log(torch.tensor([0.5, 0.2, 0.4, 0.3, 0.9]))
    engine = torch.log(torch.tensor([0.4, 0.4, 0.5, 0.1, 0.1]))
    sequences = torch.tensor([0, 1, 0, 1, 1])  # two sequences whose tokens alternate, as those of a tree may
    live = torch.tensor([True, True, True, True, False])
    ratios = sequence_ratios(trainer, engine, sequences, live)
    first, second = (0.5 / 0.4) * (0.4 / 0.5), (0.2 / 0.4) * (0.3 / 0.1)
    torch.testing.assert_close(ratios, torch.tensor([first, second, first, second, second]))
    assert truncate_ratios(ratios, 1.2).weights.tolist() == pytest.approx([first, 1.2, first, 1.2, 1.2])
    assert mask_ratios(ratios, 1.2).weights.tolist() == pytest.approx([first, 0, first, 0, 0])


def test_a_dead_token_of_any_value_leaves_its_sequence_finite() -> None:
    live = torch.tensor([True, False, True])
    ratios = sequence_ratios(
        torch.tensor([-1.0, math.nan, 300.0]), torch.tensor([-1.5, -1.0, 0.0]), torch.tensor([0, 0, 1]), live
    )
    assert ratios.tolist() == pytest.approx([math.exp(0.5), math.exp(0.5), math.exp(20)])


def test_gap_counts_only_weighted_targets() -> None:
    total, largest = logprob_gap(
        torch.tensor([-1.0, -2.0, torch.nan]), torch.tensor([-1.5, -2.25, 0.0]), torch.tensor([1.0, 0.5, 0.0])
    )
    assert (total.item(), largest.item()) == (0.75, 0.5)
    empty = torch.zeros(0)
    assert [value.item() for value in logprob_gap(empty, empty, empty)] == [0, 0]
