"""Options of the algorithm in real runs: KL in loss or reward, importance correction, epochs and mini-batches."""

from pathlib import Path
from typing import Any

import pytest
from harness import Launched, config, task, train, write

from lockstep.ledger.ledger import Ledger


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return task(tmp_path_factory.mktemp("options"))


def rows(run: Path) -> list[dict[str, float]]:
    with Ledger.reader(run) as ledger:
        return [row.values for row in ledger.metrics_rows()]


def grpo(folder: Path, name: str, **changes: Any) -> dict[str, Any]:
    return config(
        folder, "grpo", name=name, steps=3, evaluation=None, checkpoint={"every": 0, "export": False}, **changes
    )


def test_every_correction_at_once_on_two_ranks(folder: Path) -> None:
    loss = {
        "clip_low": 0.1,
        "clip_high": 0.28,
        "dual_clip": 3.0,
        "aggregation": "seq-mean-token-sum-norm",
        "entropy_coefficient": 0.001,
        "old_logprobs": "trainer",
        "importance": {"kind": "truncate", "cap": 2.0},
        "kl": {"coefficient": 0.05, "estimator": "k3", "where": "loss"},
    }
    run = train(folder, grpo(folder, "all", loss=loss, epochs=2, minibatch_size=8, advantage={"kind": "dr_grpo"}))
    first, *_, last = rows(run)
    # Engine and trainer compute the same in fp32, and at the first step the policy is the reference.
    assert first["policy/engine_gap_max"] < 1e-4
    assert abs(first["policy/importance_weight"] - 1) < 1e-4
    assert 0 <= first["policy/kl"] < last["policy/kl"]
    # Four updates from the same rollouts: the ratio differs from one, and tokens are clipped.
    assert first["policy/kl_k3"] > 0
    assert {"policy/clip_fraction", "policy/clip_dual", "policy/grad_norm", "policy/entropy"} <= first.keys()


@pytest.mark.slow
def test_a_penalty_in_the_reward_on_one_rank(folder: Path) -> None:
    loss = {"kl": {"coefficient": 0.5, "estimator": "k1", "where": "reward"}}
    changes: dict[str, Any] = {"loss": loss, "advantage": {"kind": "rloo"}, "trainer": {"ranks": 1}}
    run = train(folder, grpo(folder, "penalty", **changes))
    found = rows(run)
    assert [row["policy/loss"] == row["policy/loss"] for row in found] == [True] * 3  # no NaN
    assert found[0]["policy/engine_gap_max"] < 1e-4


def test_several_engines_and_scorers_share_the_work(folder: Path) -> None:
    values = grpo(folder, "wide", rollout={"sampling": {"max_tokens": 4}, "engine": {"count": 2, "max_rows": 8}})
    values["reward"] = {**values["reward"], "workers": 2, "batch_size": 4}
    run = train(folder, values)
    with Ledger.reader(run) as ledger:
        for step in ledger.collected_steps():
            rollouts = ledger.rollouts(step)
            assert rollouts is not None
            assert rollouts.rewards.shape == (4, 4)
            assert {int(version) for group in rollouts.groups for c in group.completions for version in c.versions} == {
                step
            }
    logs = [(run / "logs" / f"engine-{n}.log").exists() for n in range(2)]
    assert logs == [True, True]


@pytest.mark.slow
def test_files_that_are_named_as_modules_of_python_do_no_harm(tmp_path: Path) -> None:
    """In the folder where the run is started, which is the workers' too."""
    home = task(tmp_path)
    for name in ("tty", "queue", "random", "lockstep"):
        (home / f"{name}.py").write_text("raise SystemExit('this module is the user's')")
    values = grpo(home, "shadows")
    run = Path(values["folder"]) / values["name"]
    launched = Launched.start(run, str(write(home, values)), cwd=home, cold=True)
    assert launched.finish() == 0, launched.text()
