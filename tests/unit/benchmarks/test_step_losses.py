"""Four steps of every loss beside TRL's own trainers, where TRL is installed."""

from pathlib import Path

import pytest

from benchmarks.runner import peer_installed
from benchmarks.step_losses import BOUND, CASES, STEPS, compare, differences, table

LOSS = {"trl": "loss", "lockstep": "policy/loss"}
NORM = {"trl": "grad_norm", "lockstep": "policy/grad_norm"}


def rows(side, losses):
    return [{LOSS[side]: loss, NORM[side]: 1.0} for loss in losses]


def test_a_difference_is_relative_to_the_largest_value():
    case = CASES["simpo"]
    found = differences(case, rows("trl", [4.0, 2.0, 0.0, 1.0]), rows("lockstep", [4.0, 2.0, 0.5, 1.0]))
    assert found == {"loss": 0.125, "grad_norm": 0.0}
    with pytest.raises(ValueError, match="loss of 4 and 3 steps, expected 4"):
        differences(case, rows("trl", [1.0] * 4), rows("lockstep", [1.0] * 3))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not peer_installed(), reason="TRL is not in build/peer: run script/benchmark once")
def test_four_steps_of_every_loss_are_those_of_trl(tmp_path: Path) -> None:
    results = compare(CASES, tmp_path, print)
    for name, each in results.items():
        assert max(each["differences"].values()) < BOUND, (name, each["differences"])
        losses = [row["loss"] for row in each["trl"]]
        assert len(set(losses)) == STEPS, "the losses of the steps differ from each other"
    assert max(row["kl"] for row in results["kto"]["trl"]) > 0
    assert len(table(results)) == 2 + len(CASES)
