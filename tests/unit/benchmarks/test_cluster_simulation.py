"""The simulation of a large cluster agrees with the closed form where that applies, and its mechanisms help."""

import itertools
import statistics

import pytest

from benchmarks.cluster_simulation import (
    HOUR,
    KINDS,
    LEFT_OUT,
    NODES,
    RATES,
    STEPS_UP,
    Assumed,
    Measured,
    check_daly,
    daly,
    measured,
    shares,
    simulate,
    table,
)

TIMES = Measured((1.0, 45.0), (3.0, 8.0), (2.0, 5.0))


def test_the_closed_form_is_met() -> None:
    for row in check_daly(seeds=40, days=60.0):
        assert abs(row["simulated"] - row["daly"]) < max(4 * row["error"], 0.004), row


def test_without_failures_only_checkpoints_cost_time() -> None:
    assumed = Assumed()
    (found,) = shares(1e-12, STEPS_UP[0][1], assumed, TIMES, 1, 30.0)
    whole = assumed.checkpoint_every_s / (assumed.checkpoint_every_s + assumed.checkpoint_s)
    assert found == pytest.approx(whole, abs=1e-3)
    assert daly(1e12, assumed.checkpoint_every_s, assumed.checkpoint_s, 900.0) == pytest.approx(whole, abs=1e-6)


def test_youngs_interval_is_the_best_one() -> None:
    """sqrt(2 C M), J. W. Young 1974."""
    mtbf_s, cost_s = 8 * HOUR, 30.0
    best = (2 * cost_s * mtbf_s) ** 0.5
    at_best = daly(mtbf_s, best, cost_s, 900.0)
    assert all(daly(mtbf_s, factor * best, cost_s, 900.0) < at_best for factor in (0.7, 1.4))


def test_the_published_counts_add_up() -> None:
    assert sum(KINDS.values()) == 419
    assert {name: round(24 / (rate * NODES), 1) for name, rate in RATES.items()} == {
        "Llama 3": 49.5, "RSC-1": 7.9, "RSC-2": 80.1, "OPT-175B": 13.3
    }  # fmt: skip


def test_each_mechanism_adds_time_and_leaving_it_out_costs_some() -> None:
    rate = RATES["RSC-1"]
    means = [statistics.mean(shares(rate, can, Assumed(), TIMES, 6, 60.0)) for _, can in STEPS_UP]
    assert all(after > before - 0.002 for before, after in itertools.pairwise(means)), means
    assert means[-1] > means[0] + 0.2
    for name, can in LEFT_OUT:
        assert statistics.mean(shares(rate, can, Assumed(), TIMES, 6, 60.0)) < means[-1] + 0.001, name


def test_the_same_seed_gives_the_same_result() -> None:
    assert shares(0.01, STEPS_UP[-1][1], Assumed(), TIMES, 3, 20.0) == shares(
        0.01, STEPS_UP[-1][1], Assumed(), TIMES, 3, 20.0
    )


def test_times_come_from_the_file_of_the_endurance_benchmark() -> None:
    restarts = [{"role": "policy", "seconds": 3.5}, {"role": "rollout", "seconds": 2.5}]
    faults = [
        {"fault": "stop policy", "named_s": 1.5, "restarts": restarts},
        {"fault": "kill engine", "named_s": 0.1, "restarts": []},
        {"fault": "hold GIL of policy", "named_s": None, "restarts": []},
    ]
    assert measured([{"seed": 1}, {"faults": faults}]) == Measured((1.5,), (3.5,), (2.5,))
    with pytest.raises(ValueError, match="no detection of a silent process"):
        measured([{"faults": faults[1:]}])


def test_the_table_says_what_was_measured_and_what_was_assumed() -> None:
    text = "\n".join(table(simulate(TIMES, 3, 5.0)))
    assert "RSC-1: a failure in 7.9 h" in text and "silent 23.0 s (of 2)" in text and "repair_s 14400" in text
