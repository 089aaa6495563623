"""PPO with vLLM as engine, on devices of its own and on shared ones: processes are killed, and the run ends with the
same models, bit by bit, as one that nothing disturbs."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from harness import Launched, task, write
from resume_scenarios import assert_same
from test_colocation import make_scorer, settings
from test_recovery import kill_worker, replacements

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("vllm") is None, reason="needs the extra `vllm`: script/test --vllm"),
    pytest.mark.timeout(900),
]
LIMIT_S = 400.0
"""Time limit for a run: each vLLM takes about half a minute to start."""


def start(home: Path, folder: Path, name: str, hold: dict[str, Any] | None = None, **changes: Any) -> Launched:
    engine = {"kind": "vllm", "cpu_kv_cache_gb": 0.05, "threads": 1}
    rollout = {"sampling": {"max_tokens": 4}, "engine": engine}
    values = settings(home, name, folder=str(folder / "runs"), rollout=rollout, **changes)
    return Launched.start(folder / "runs" / name, str(write(folder, values)), hold=hold)


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an undisturbed run in which no role shares a device."""
    home = tmp_path_factory.mktemp("ppo-vllm")
    task(home, hidden=64)  # vLLM's kernels for CPUs want at least 32 numbers per head
    make_scorer(home)
    launched = start(home, home, "apart")
    assert launched.finish(LIMIT_S) == 0, launched.text()
    return home


@pytest.mark.parametrize("colocate", ["all", []])
def test_killed_processes_are_replaced(apart: Path, tmp_path: Path, colocate: Any) -> None:
    """An engine is killed while another role has its turn on the devices, or while it generates."""
    stage = "train" if colocate else "rollout"
    hold = {"stage": stage, "seconds": 0.5, "at_end": False}
    launched = start(apart, tmp_path, "killed", hold, placement={"colocate": colocate})
    launched.wait_for(stage, 1, LIMIT_S)
    kill_worker(launched, "engine-0")
    kill_worker(launched, "reference-0")
    launched.wait_for(stage, 2, LIMIT_S)
    kill_worker(launched, "critic-0")
    assert launched.finish(LIMIT_S) == 0, launched.text()
    assert_same(launched, apart / "runs/apart")
    assert {"engine-0.1", "critic-0.1", "reference-0.1"} <= set(replacements(launched.folder))
