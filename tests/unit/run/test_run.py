"""Steps as transactions, seen from the recipe."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from lockstep.config.loader import check_config
from lockstep.data.samples import Completion, Group, Prompt, Rollouts
from lockstep.ledger.ledger import Ledger
from lockstep.run.interrupt import InterruptHandler
from lockstep.run.planning.run_data import RunData
from lockstep.run.recovery.recovery_manager import RecoveryManager
from lockstep.run.recovery.trainer_recovery import RecoveryContext
from lockstep.run.run import Run, RunRoles
from lockstep.run.trained_roles import TrainedRoles


def rollouts(step: int) -> Rollouts:
    tokens = np.array([1, 2], np.int32)
    completion = Completion("r", tokens, np.zeros(2, np.float32), np.zeros(2, np.int32), "stop", "ab")
    prompt = Prompt(f"0:{step}", step, np.array([3], np.int32), "p")
    return Rollouts(step, 0, [Group(prompt, [completion, completion], np.array([0, 1], np.float32))])


def test_a_repeated_step_is_not_written_again(tmp_path: Path) -> None:
    """After an upgrade of pyarrow, say, the same rollouts are other bytes; that must not end the run."""
    values = {
        "recipe": "grpo", "name": "x", "steps": 3, "model": {"path": "m"}, "data": {"path": "d"},
        "reward": {"terms": [{"kind": "exact_match"}]}, "prompts_per_step": 1,
    }  # fmt: skip
    with Ledger.create(tmp_path / "run", {"name": "x"}) as ledger:
        asked = SimpleNamespace(request=lambda step: None, metrics=lambda step: {})
        samples: Any = SimpleNamespace(counts=lambda samples: {}, has_images=False)
        data = RunData(samples)
        roles: Any = RunRoles(trained=TrainedRoles([]), data=data, rollouts=asked)  # type: ignore[arg-type]
        config = check_config(values, "test")
        recovery = RecoveryManager(config.recovery, ledger)
        reporter: Any = SimpleNamespace(choose_samples=lambda step, rollouts: [])
        run = Run(
            config, ledger.folder, ledger, roles, reporter, InterruptHandler(), 0, RecoveryContext(recovery, None)
        )  # type: ignore[arg-type]
        ledger.record_rollouts(0, rollouts(0), {"written by": "an older version"})
        before = ledger.step_path(0).read_bytes()
        stored = run.groups(0)
        assert stored.missing == 0
        run.collected(0, stored)
        assert ledger.step_path(0).read_bytes() == before
        fresh = run.groups(1)
        assert fresh.missing == 1
        fresh.add(rollouts(1))
        run.collected(1, fresh)
        assert ledger.collected_steps() == [0, 1]
