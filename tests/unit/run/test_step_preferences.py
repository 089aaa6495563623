"""The derivatives of a step's preference loss by its targets' log-probabilities."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import logsigmoid

from lockstep.algos.preference_losses import PAIR_LOSSES, SORTED
from lockstep.config.algorithm import PREFERENCE_MIXTURES, PreferenceLoss
from lockstep.data.forest_builder import forest_from_labelled, forest_from_pairs
from lockstep.data.mini_batches import TrainingBatch, pack
from lockstep.data.samples import LabelledCompletion, Pair
from lockstep.run.step_preferences import labelled_update, preference_update, prepare_pairs
from lockstep.train.objective import make_objective

SIZES = [(5, 4, 7), (3, 6, 2), (8, 1, 1), (2, 3, 9)]
"""Numbers of tokens of prompt, chosen and rejected completion."""


def pairs_of(sizes: list[tuple[int, int, int]] = SIZES) -> list[Pair]:
    random = np.random.default_rng(0)
    return [
        Pair(f"0:{row}", row, *(random.integers(0, 50, size).astype(np.int32) for size in each))
        for row, each in enumerate(sizes)
    ]


def filled(
    config: PreferenceLoss, ranks: int = 1, budget: int = 64, mode: Any = "forest", whole_trees: bool = False
) -> TrainingBatch:
    batch = pack(forest_from_pairs(pairs_of(), config.learns_prompts), ranks, budget, mode, whole_trees)
    random = np.random.default_rng(1)
    for name in config.evaluated_fields:
        batch.set_per_target(name, -random.random(batch.targets) * 3)
    prepare_pairs(batch, config)
    return batch


def config(*types: str, **changes: Any) -> PreferenceLoss:
    return PreferenceLoss(**{"type": types, **changes})


def sums_of(values: torch.Tensor, batch: TrainingBatch, kept: np.ndarray | None = None) -> torch.Tensor:
    sequences = torch.from_numpy(batch.sequences.astype(np.int64))
    if kept is not None:
        values = values * torch.from_numpy(kept)
    return torch.zeros(2 * len(SIZES), dtype=torch.float64).index_add(0, sequences, values)


def test_dpo_is_its_formula_on_tokens() -> None:
    """Written once more on the log-probabilities of tokens, and differentiated by torch."""
    loss, batch = config("sigmoid", beta=0.2), filled(config("sigmoid"))
    logprobs = torch.from_numpy(batch.fields["policy_logprob"].astype(np.float64)).requires_grad_()
    reference = torch.from_numpy(batch.fields["reference_logprob"].astype(np.float64))
    ratios = sums_of(logprobs, batch) - sums_of(reference, batch)
    gaps = 0.2 * (ratios[0::2] - ratios[1::2])
    expected = -logsigmoid(gaps).mean()
    (gradient,) = torch.autograd.grad(expected, logprobs)
    update = preference_update(batch, loss)
    assert update.metrics["loss"] == pytest.approx(expected.item(), rel=1e-6)
    np.testing.assert_allclose(update.coefficients, gradient.numpy(), rtol=1e-5)
    assert update.metrics["rewards/margins"] == pytest.approx(gaps.mean().item(), rel=1e-6)
    assert update.metrics["rewards/accuracies"] == (gaps > 0).double().mean().item()


@pytest.mark.parametrize("type_", ["sigmoid", "simpo", "kl"])
def test_wpo_weighs_pairs_by_their_probability(type_: str) -> None:
    """The weights are constants of the gradient; written once more from TRL's lines."""
    types = ("sigmoid", "sppo_hard") if type_ == "kl" else (type_,)
    loss, plain = config(*types, use_weighting=True), config(*types)
    batch = filled(loss)
    logprobs = torch.from_numpy(batch.fields["policy_logprob"].astype(np.float64))
    log_sum_sq_probs = -torch.from_numpy(batch.fields["renyi_entropy"].astype(np.float64))
    tokens = torch.tensor([float(n) for each in SIZES for n in each[1:]])
    of_completions = torch.exp(sums_of(logprobs - log_sum_sq_probs, batch) / tokens)
    weights = of_completions[0::2] * of_completions[1::2]
    update = preference_update(batch, loss)
    assert update.metrics["pair_weight"] == pytest.approx(weights.mean().item(), rel=1e-6)
    expected, total = np.zeros(batch.targets), 0.0
    for pair in range(len(SIZES)):
        alone = pack(forest_from_pairs(pairs_of()[pair : pair + 1]), 1, 64)
        inside = batch.sequences // 2 == pair
        for name in plain.evaluated_fields:
            alone.set_per_target(name, batch.fields[name][inside])
        single = preference_update(alone, plain)
        expected[inside] = single.coefficients * weights[pair].item() / len(SIZES)
        total += single.metrics["loss"] * weights[pair].item() / len(SIZES)
    assert update.metrics["loss"] == pytest.approx(total, rel=1e-6)
    np.testing.assert_allclose(update.coefficients, expected, rtol=1e-5, atol=1e-9)


def test_orpo_learns_the_prompts_of_chosen_completions() -> None:
    loss, batch = config("orpo"), filled(config("orpo"))
    assert set(loss.evaluated_fields) == {"policy_logprob"}
    assert batch.targets == sum(prompt - 1 + chosen + rejected for prompt, chosen, rejected in SIZES)
    logprobs = torch.from_numpy(batch.fields["policy_logprob"].astype(np.float64)).requires_grad_()
    inside = batch.fields["in_prompt"] == 0
    means = sums_of(logprobs, batch, inside) / torch.tensor([float(n) for each in SIZES for n in each[1:]])
    odds = means.exp() / (1 - means.exp())
    ratio = -logsigmoid(torch.log(odds[0::2] / odds[1::2])).mean()
    of_chosen = torch.from_numpy(batch.sequences % 2 == 0)
    expected = 0.1 * ratio - logprobs[of_chosen].mean()
    (gradient,) = torch.autograd.grad(expected, logprobs)
    update = preference_update(batch, loss)
    assert update.metrics["loss"] == pytest.approx(expected.item(), rel=1e-6)
    np.testing.assert_allclose(update.coefficients, gradient.numpy(), rtol=1e-4, atol=1e-8)


@pytest.mark.parametrize("name", ["sigmoid", "aot", "sft", "mpo", "orpo", "simpo"])
def test_the_split_of_a_batch_does_not_matter(name: str) -> None:
    whole = preference_update(filled(config(name)), config(name))
    for ranks, budget, mode in ((3, 64, "forest"), (2, 16, "forest"), (2, 16, "block"), (1, 16, "single")):
        split = preference_update(filled(config(name), ranks, budget, mode), config(name))
        np.testing.assert_array_equal(split.coefficients, whole.coefficients)
        assert split.metrics == whole.metrics


SINGLE = [
    *((name, {}) for name in (*PAIR_LOSSES, *PREFERENCE_MIXTURES) if name not in SORTED | {"exo_pair"}),
    ("exo_pair", {"label_smoothing": 0.1}),
    ("sigmoid", {"ld_alpha": 0.3}),
    ("sigmoid", {"f_divergence_type": "js_divergence"}),
]


@pytest.mark.parametrize(("name", "changes"), SINGLE)
@pytest.mark.parametrize(("ranks", "budget"), [(1, 64), (1, 18), (5, 64)])
def test_losses_in_rows_have_the_gradient_of_the_whole_step(
    name: str, changes: dict[str, Any], ranks: int, budget: int
) -> None:
    """Rows of whole pairs, also with idle ranks, give the loss, the gradient and the metrics of all pairs at once."""
    loss = config(name, **changes)
    assert not loss.evaluates_policy
    batch = filled(loss, ranks, budget, whole_trees=True)
    expected, objective = preference_update(batch, loss), make_objective(loss)
    totals, gradient = dict.fromkeys(objective.metrics, 0.0), np.zeros(batch.targets)
    for row in (row for rank in next(batch.minibatches(objective=loss)).by_rank for row in rank):
        on_device, known = row.to(torch.device("cpu")), row.index >= 0
        values = np.where(known, batch.fields["policy_logprob"][row.index], -1.0)
        logprobs = torch.from_numpy(values).requires_grad_()
        found = objective.compute(on_device.fields, {"logprobs": logprobs}, on_device.sequences)
        (by_target,) = torch.autograd.grad(found.loss, logprobs)
        gradient[row.index[known]] += by_target.numpy()[known]
        assert known.all() or not by_target.any()
        totals = {key: total + found.metrics[key].item() for key, total in totals.items()}
    np.testing.assert_allclose(gradient, expected.coefficients, rtol=2e-6, atol=1e-9)
    assert totals["tokens"] == batch.targets
    assert {key: totals[key] for key in expected.metrics} == pytest.approx(expected.metrics, rel=1e-6)


@pytest.mark.parametrize(
    "loss", [config("aot"), config("sigmoid", "aot_unpaired"), config("simpo", use_weighting=True)]
)
def test_losses_of_several_pairs_need_coefficients(loss: PreferenceLoss) -> None:
    assert loss.evaluates_policy and "coefficient" in make_objective(loss).fields


def test_tokens_beyond_the_shorter_completion_count_less() -> None:
    """LD-DPO: 1 is DPO, 0 cuts."""
    batch = filled(config("sigmoid"))
    plain = preference_update(batch, config("sigmoid"))
    full, without, halved = (
        preference_update(filled(loss), loss) for loss in (config("sigmoid", ld_alpha=alpha) for alpha in (1, 0, 0.5))
    )
    assert full.metrics == plain.metrics
    cut, half = without.coefficients, halved.coefficients
    for sequence, size in enumerate([min(each[1:]) for each in SIZES for _ in range(2)]):
        of = batch.sequences == sequence
        assert np.all(cut[of][:size] != 0) and np.all(cut[of][size:] == 0)
        np.testing.assert_allclose(half[of][size:], half[of][0] / 2, rtol=1e-6)


@pytest.mark.parametrize("name", PREFERENCE_MIXTURES)
def test_a_mixture_reports_its_terms(name: str) -> None:
    loss = config(name)
    metrics = preference_update(filled(loss), loss).metrics
    total = sum(weight * metrics[f"loss/{term}"] for term, weight in loss.terms.items())
    assert metrics["loss"] == pytest.approx(total, rel=1e-9)


def test_weights_multiply_losses() -> None:
    loss = config("sigmoid", "sft", weights=(2.0, 0.5))
    assert loss.terms == {"sigmoid": 2.0, "sft": 0.5}
    batch = filled(loss)
    parts = [preference_update(batch, config(name)).coefficients for name in ("sigmoid", "sft")]
    np.testing.assert_allclose(preference_update(batch, loss).coefficients, 2 * parts[0] + 0.5 * parts[1], rtol=1e-5)


@pytest.mark.parametrize("logprob", [-1e-6, 0.0])
def test_pairs_of_one_token_are_finite(logprob: float) -> None:
    """Also where the policy is certain, as it is of what it has learned by heart."""
    pairs = [replace(pair, chosen=pair.chosen[:1], rejected=pair.rejected[:1]) for pair in pairs_of()]
    for name in ("ipo", "orpo", "sigmoid_norm"):
        loss = config(name)
        batch = pack(forest_from_pairs(pairs, loss.learns_prompts), 1, 64)
        for field in loss.evaluated_fields:
            batch.set_per_target(field, np.full(batch.targets, logprob))
        assert np.isfinite(preference_update(batch, loss).coefficients).all()


def labelled() -> list[LabelledCompletion]:
    return [
        LabelledCompletion(pair.uid, pair.row, pair.prompt, pair.chosen, row % 3 == 0)
        for row, pair in enumerate(pairs_of())
    ]


def test_kto_compares_with_the_completions_of_other_prompts() -> None:
    """Written once more on the log-probabilities of tokens. Sample i has the completion of sample i - 1 as well."""
    samples, loss = labelled(), config("kto", beta=0.3, desirable_weight=1.5)
    batch, random = pack(forest_from_labelled(samples, mismatched=True), 1, 64), np.random.default_rng(1)
    assert np.bincount(batch.sequences).tolist() == [4, 6, 1, 3, 3, 4, 1, 1], "one of 6 is cut"
    for name, scale in (("policy_logprob", 1), ("reference_logprob", 2)):
        batch.set_per_target(name, -random.random(batch.targets) * scale)
    values = batch.fields["policy_logprob"].astype(np.float64)
    logprobs = torch.from_numpy(values).requires_grad_()
    gaps = logprobs - torch.from_numpy(batch.fields["reference_logprob"].astype(np.float64))
    sequences = torch.from_numpy(batch.sequences.astype(np.int64))
    ratios = torch.zeros(8, dtype=torch.float64).index_add(0, sequences, gaps)
    baseline = ratios[4:].mean().clamp(min=0).detach()
    assert baseline > 0
    signs = torch.tensor([1.0, -1.0, -1.0, 1.0])
    terms = 1 - torch.sigmoid(0.3 * signs * (ratios[:4] - baseline))
    expected = (terms * torch.tensor([1.5, 1.0, 1.0, 1.5])).mean()
    (gradient,) = torch.autograd.grad(expected, logprobs)
    update = labelled_update(batch, np.array([sample.desirable for sample in samples]), loss)
    assert update.metrics["loss"] == pytest.approx(expected.item()) and update.metrics["kl"] == pytest.approx(
        baseline.item()
    )
    np.testing.assert_allclose(update.coefficients, gradient.numpy()[batch.sequences < 4], rtol=1e-5)
    assert (
        pack(forest_from_labelled(samples), 1, 64).sequences.tolist() == batch.sequences[batch.sequences < 4].tolist()
    )
    desirable = 0.3 * ratios[[0, 3]].mean().item()
    assert update.metrics["rewards/chosen"] == pytest.approx(desirable)


def test_metrics_of_a_label_that_no_completion_has_are_absent() -> None:
    loss, samples = config("apo_zero_unpaired"), labelled()
    batch = pack(forest_from_labelled(samples), 1, 64)
    for name in loss.evaluated_fields:
        batch.set_per_target(name, np.full(batch.targets, -0.5))
    update = labelled_update(batch, np.ones(4, np.bool_), loss)
    assert update.metrics == {"loss": 0.5, "rewards/chosen": 0.0}


def test_a_mismatched_completion_is_no_longer_than_the_samples() -> None:
    tokens = np.zeros(60, np.int32)
    samples = [
        LabelledCompletion("0:0", 0, tokens[:50], tokens[:5], True),
        LabelledCompletion("0:1", 1, tokens[:5], tokens[:50], False),
    ]
    batch = pack(forest_from_labelled(samples, mismatched=True), 1, 55)
    assert np.bincount(batch.sequences).tolist() == [5, 50, 5, 5]
