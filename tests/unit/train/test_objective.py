import math

import numpy as np
import pytest
import torch
from torch import Tensor

from lockstep.config.algorithm import (
    CISPO,
    GSPO,
    CrossEntropy,
    ImportanceCorrection,
    KLPenalty,
    ObjectiveConfig,
    PolicyLoss,
    PPOClip,
)
from lockstep.data.micro_batch import MicroBatch
from lockstep.train.metric_reduction import MetricAccumulator, ReducedMetrics, metric_vector_size
from lockstep.train.objective import LossOutput, check_fields, make_objective


def values(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float32)


def compute_loss(
    loss: ObjectiveConfig, fields: dict[str, Tensor], logprobs: Tensor, entropy: Tensor, sequences: Tensor | None = None
) -> LossOutput:
    return make_objective(loss).compute(fields, {"logprobs": logprobs, "entropy": entropy}, sequences)


def metrics(outcome: LossOutput, loss: ObjectiveConfig) -> dict[str, float]:
    names = make_objective(loss).metrics
    meter = MetricAccumulator(names, torch.device("cpu"))
    meter.add(outcome)
    return ReducedMetrics(names, meter.vector(values(0.0)[0])[None]).values


def test_cross_entropy_is_the_weighted_sum_of_negative_log_probabilities() -> None:
    logprobs = values(-1.0, -2.0, -4.0).requires_grad_()
    outcome = compute_loss(CrossEntropy(), {"weight": values(0.5, 0.25, 0.0)}, logprobs, logprobs)
    assert outcome.loss.item() == pytest.approx(1.0)
    outcome.loss.backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [-0.5, -0.25, 0.0]
    assert metrics(outcome, CrossEntropy()) == pytest.approx({"loss": 1.0, "tokens": 2, "logprob": -1.5})


def test_a_policy_loss_by_hand() -> None:
    loss = PPOClip(
        clip_low=0.2,
        clip_high=0.3,
        dual_clip=3.0,
        entropy_coefficient=0.5,
        kl=KLPenalty(coefficient=0.1, estimator="k2"),
        importance=ImportanceCorrection(kind="truncate", cap=1.5),
        old_logprobs="trainer",
    )
    ratios = [1.0, 1.5, 0.5, 4.0]  # as it is; clipped high; clipped low; dual clip
    old = values(-1.0, -2.0, -1.5, -3.0)
    logprobs = (old + torch.tensor(ratios).log()).requires_grad_()
    engine = old - values(0.1, 0.0, 1.0, -0.2)
    fields = {
        "weight": values(0.1, 0.2, 0.3, 0.4),
        "advantage": values(2.0, 1.0, -1.0, -2.0),
        "old_logprob": old,
        "engine_logprob": engine,
        "reference_logprob": logprobs.detach() + values(0.0, 1.0, -1.0, 2.0),
    }
    outcome = compute_loss(loss, fields, logprobs, values(1.0, 2.0, 3.0, 4.0))
    corrections = [math.exp(0.1), 1.0, 1.5, math.exp(-0.2)]
    objectives = [-2.0, -1.3, 0.8, 6.0]
    weights = [0.1, 0.2, 0.3, 0.4]
    policy = sum(w * o * c for w, o, c in zip(weights, objectives, corrections, strict=True))
    kl = 0.1 * (0.2 * 0.5 + 0.3 * 0.5 + 0.4 * 2.0)
    entropy = -0.5 * (0.1 + 0.4 + 0.9 + 1.6)
    reported = metrics(outcome, loss)
    assert reported["loss"] == pytest.approx(outcome.loss.item(), rel=1e-6) == pytest.approx(policy + kl + entropy)
    assert reported["policy_loss"] == pytest.approx(policy)
    assert reported["kl_loss"] == pytest.approx(kl)
    assert reported["entropy_loss"] == pytest.approx(entropy)
    assert reported["entropy"] == pytest.approx(2.5)
    assert reported["kl"] == pytest.approx((0 + 0.5 + 0.5 + 2.0) / 4)
    assert reported["ratio"] == pytest.approx(sum(ratios) / 4)
    assert (reported["clip_low"], reported["clip_high"], reported["clip_dual"]) == (0.25, 0.25, 0.25)
    assert reported["clip_fraction"] == pytest.approx(0.75)
    assert reported["engine_gap_mean"] == pytest.approx((0.1 + 0 + 1.0 + 0.2) / 4)
    assert reported["engine_gap_max"] == pytest.approx(1.0)
    assert reported["importance_weight"] == pytest.approx(sum(corrections) / 4)
    assert reported["importance_cut"] == pytest.approx(0.25)
    outcome.loss.backward()
    assert logprobs.grad is not None
    # clipped tokens have the gradient of the KL alone: weight * coefficient * (policy - reference)
    assert logprobs.grad[1:].tolist() == pytest.approx([-0.2 * 0.1, 0.3 * 0.1, -0.4 * 0.1 * 2], rel=1e-5)


def test_targets_of_weight_zero_add_nothing() -> None:
    loss = PPOClip(kl=KLPenalty(coefficient=0.1), entropy_coefficient=0.1)
    logprobs = values(-1.0, -torch.inf).requires_grad_()
    fields = {name: values(-1.0, torch.nan) for name in ("advantage", "engine_logprob", "reference_logprob")}
    outcome = compute_loss(loss, fields | {"weight": values(1.0, 0.0)}, logprobs, values(1.0, torch.nan))
    reported = metrics(outcome, loss)
    assert all(math.isfinite(value) for value in reported.values())
    assert reported["tokens"] == 1
    assert reported["entropy"] == 1.0


def test_a_step_of_empty_microbatches_has_finite_metrics() -> None:
    loss = PPOClip()
    fields = {name: values(0.0) for name in make_objective(loss).fields}
    logprobs = values(-3.0).requires_grad_()
    outcome = compute_loss(loss, fields, logprobs, values(1.0))
    outcome.loss.backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [0.0]
    assert set(metrics(outcome, loss).values()) == {0.0}


def test_disabled_terms_have_no_metrics() -> None:
    fields = {"weight": values(1.0), "advantage": values(1.0), "engine_logprob": values(-1.0)}
    reported = metrics(compute_loss(PPOClip(), fields, values(-1.0), values(1.0)), PPOClip())
    assert "kl" not in reported
    assert "importance_weight" not in reported
    assert reported["loss"] == -1.0


@pytest.mark.parametrize(
    ("loss", "missing"),
    [
        (CrossEntropy(), None),
        (PPOClip(), None),
        (PPOClip(old_logprobs="trainer"), "old_logprob"),
        (PPOClip(old_logprobs="trainer", importance=ImportanceCorrection(kind="truncate")), "old_logprob"),
        (PPOClip(old_logprobs="trainer", importance=ImportanceCorrection(kind="mask")), "old_logprob"),
        (GSPO(), None),
        (CISPO(), None),
        (PPOClip(kl=KLPenalty(coefficient=0.1)), "reference_logprob"),
        (PPOClip(kl=KLPenalty(coefficient=0.1, where="reward")), None),
    ],
)
def test_which_fields_a_loss_needs(loss: PolicyLoss | CrossEntropy, missing: str | None) -> None:
    one = np.ones(1, np.int32)
    fields = {name: np.ones(1, np.float32) for name in ("weight", "advantage", "engine_logprob")}
    packed = MicroBatch(one, one, -one, 0 * one, one, one.astype(np.int64), fields, one)
    if missing is None:
        check_fields([packed], make_objective(loss))
    else:
        with pytest.raises(ValueError, match=f"no field '{missing}'"):
            check_fields([packed], make_objective(loss))


def test_ranks_and_microbatches_are_added_up_and_the_first_bad_one_is_found() -> None:
    names, vectors = make_objective(PPOClip()).metrics, []
    for rank in range(3):
        meter = MetricAccumulator(names, torch.device("cpu"))
        for number in range(4):
            bad = (rank, number) in {(1, 2), (1, 3), (2, 0)}
            reported = {"tokens": values(2.0)[0], "loss": values(0.5)[0], "logprob": values(-rank)[0]}
            reported["engine_gap_max"] = values(rank + number)[0]
            meter.add(LossOutput(values(math.nan if bad else 0.5)[0], reported))
        vectors.append(meter.vector(values(math.inf if rank == 0 else 2.0)[0]))
    assert vectors[0].shape == (metric_vector_size(names),) == (5 + len(names),)
    totals = ReducedMetrics(names, torch.stack(vectors))
    assert totals.bad_microbatches == [(1, 2), (2, 0)]
    assert totals.bad_gradients == [0]
    reduced = totals.values
    assert reduced["tokens"] == 24
    assert reduced["loss"] == pytest.approx(6.0)
    assert reduced["logprob"] == pytest.approx(-(4 + 8) / 24)
    assert reduced["engine_gap_max"] == 5


def test_without_targets_only_sums_are_reported() -> None:
    """All advantages are zero, so that every rank has an empty micro-batch: there is no entropy, and no ratio."""
    loss = PPOClip()
    names = make_objective(loss).metrics
    nothing = {"weight": values(0.0), "advantage": values(0.0), "engine_logprob": values(-1.0)}
    found = metrics(compute_loss(loss, nothing, values(-1.0), values(1.0)), loss)
    assert found == {name: 0.0 for name, reduction in names.items() if reduction == "sum"}


def test_importance_of_sequences_and_masks() -> None:
    old, engine = values(-1.0, -1.0, -1.0, -1.0), values(-1.3, -1.2, -0.9, -1.9)
    fields = {"weight": values(0.25, 0.25, 0.25, 0.25), "advantage": values(1.0, 1.0, 1.0, 1.0)}
    fields |= {"old_logprob": old, "engine_logprob": engine}
    sequences = torch.tensor([0, 0, 0, 1])
    first, second = math.exp(0.3 + 0.2 - 0.1), math.exp(0.9)
    for kind, floor, expected in (("truncate", 0.0, [first] * 3 + [2.0]), ("mask", 1.5, [0.0] * 4)):
        correction = ImportanceCorrection(kind=kind, level="sequence", floor=floor)
        loss = PPOClip(old_logprobs="trainer", importance=correction)
        outcome = compute_loss(loss, fields, old.clone(), values(1.0, 1.0, 1.0, 1.0), sequences)
        assert outcome.loss.item() == pytest.approx(-sum(expected) / 4, rel=1e-5)
        reported = metrics(outcome, loss)
        assert reported["importance_weight"] == pytest.approx(sum(expected) / 4, rel=1e-5)
        assert reported["importance_weight_max"] == pytest.approx(second, rel=1e-5)
        assert reported["importance_cut"] == (0.25 if kind == "truncate" else 1.0)
        with pytest.raises(ValueError, match="needs the sequences"):
            compute_loss(loss, fields, old, values(1.0, 1.0, 1.0, 1.0))


@pytest.mark.parametrize("loss", [GSPO(), PPOClip(importance=ImportanceCorrection(level="sequence"))])
def test_rows_made_by_hand_need_sequences(loss: PolicyLoss) -> None:
    one = np.ones(1, np.int32)
    fields = {name: np.ones(1, np.float32) for name in ("weight", "advantage", "engine_logprob")}
    with pytest.raises(ValueError, match="no sequences of its targets"):
        check_fields([MicroBatch(one, one, -one, 0 * one, one, one.astype(np.int64), fields)], make_objective(loss))
