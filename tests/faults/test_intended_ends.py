"""Processes that Lockstep itself ends are no incident, however users' code ends them or makes Lockstep kill them; a
process that somebody else kills is one."""

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from test_watch_command import finish, torchrun, watch

from lockstep.base import waits
from lockstep.base.folders import new_run_id
from lockstep.cluster.local_cluster import LocalCluster
from lockstep.config.cluster import LocalClusterConfig
from lockstep.config.reward import FunctionReward, RewardConfig
from lockstep.config.rollout import EnvironmentConfig
from lockstep.data.samples import Completion, Group, Prompt, Rollouts
from lockstep.rewards.scorer_pool import ScorerPool
from lockstep.rewards.scoring_messages import RewardError
from lockstep.rollout.environments.environment_pool import EnvironmentPool
from lockstep.watch.attach.watched_command import STALL_EXIT_CODE
from lockstep.watch.beacon.reader import read_beacons
from lockstep.watch.diagnosis.verdict import StallThresholds
from lockstep.watch.supervisor.supervisor_client import SupervisorEvent

HERE = Path(__file__).parent
DIAGNOSED_S = 2.5
"""The supervisor has diagnosed whatever happened before."""
BOUND_S = 30.0


class WatchedCluster:
    """A cluster with a supervisor, whose events are kept."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.events, self.known = folder, list[SupervisorEvent](), set[Path]()
        self.run = new_run_id("ends")
        self.cluster = LocalCluster(LocalClusterConfig(device="cpu"), self.run, folder, generation=1)

    def supervise(self) -> None:
        self.cluster.supervise(StallThresholds(), self.events.append)

    def incidents(self, expected: int = 0) -> list[dict[str, Any]]:
        """The verdicts of the incidents since the last call, after the supervisor has had time to write them; it gets
        longer for those that are expected, whose evidence it collects first."""
        waits.sleep(DIAGNOSED_S, "the supervisor's diagnoses")
        end = time.monotonic() + BOUND_S
        while len(found := {*self.folder.glob("incidents/*/verdict.json")} - self.known) < expected:
            assert time.monotonic() < end, "no incident was written"
            waits.sleep(0.1, "the supervisor's incident")
        self.known |= found
        return [json.loads(file.read_text()) for file in found]


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WatchedCluster]:
    made = WatchedCluster(tmp_path_factory.mktemp("ends"))
    made.supervise()
    yield made
    made.cluster.close()


def rollouts(count: int = 4) -> Rollouts:
    prompt = Prompt("0:1", 1, np.arange(2, dtype=np.int32), "say ok: ", None, "ok", {"data_source": "test"})
    tokens = np.arange(2, dtype=np.int32)
    completion = Completion("r", tokens, np.zeros(2, np.float32), np.zeros(2, np.int32), "stop", "bad")
    return Rollouts(1, 1, [Group(prompt, [completion] * count)])


def scorers(cluster: LocalCluster, function: str, workers: int = 2) -> ScorerPool:
    terms = (FunctionReward(path=f"misbehaving_rewards.py:{function}"),)
    options = {"timeout_s": 1.0, "memory_mb": 2048, "workers": workers, "batch_size": 2}
    return ScorerPool(cluster, RewardConfig(terms=terms, **options), HERE)


@pytest.mark.parametrize("function", ["raises", "exits", "reads_input", "asynchronous", "needs_memory", "hangs"])
def test_a_reward_function_that_fails_is_no_incident(watched: WatchedCluster, function: str) -> None:
    """Its scorers are killed, some of them before the agent has looked at them once."""
    pool = scorers(watched.cluster, function)
    with pytest.raises(RewardError):
        pool.score(rollouts())
    pool.close()
    assert watched.incidents() == []


@pytest.mark.parametrize("action", ["raise", "hang"])
def test_an_environment_that_fails_is_no_incident(watched: WatchedCluster, action: str) -> None:
    config = EnvironmentConfig(path="environments.py:Faulty", timeout_s=0.5, workers=1)
    pool = EnvironmentPool(watched.cluster, config, HERE)
    pool.start()
    prompt = rollouts().groups[0].prompt
    pool.begin("a", prompt)
    answered = waits.poll(lambda: pool.collect() or None, kind="queue", waits_for="a", why="reset", timeout_s=20)
    assert answered[0].failure is None
    pool.step("a", action)
    (reply,) = waits.poll(lambda: pool.collect() or None, kind="queue", waits_for="a", why="reply", timeout_s=20)
    assert reply.failure is not None
    pool.close()
    assert watched.incidents() == []


def test_scorers_that_are_killed_before_anybody_has_looked_at_them(tmp_path: Path) -> None:
    """The supervisor starts, and the agent samples its processes for the first time, when the scorers have ended."""
    watched = WatchedCluster(tmp_path)
    try:
        pool = scorers(watched.cluster, "raises")
        with pytest.raises(RewardError):
            pool.score(rollouts())
        pool.close()
        watched.supervise()
        assert watched.incidents() == []
    finally:
        watched.cluster.close()


def test_an_idle_scorer_may_leave_with_any_code(watched: WatchedCluster) -> None:
    """The module of the function ends its process in its own way when the pool is closed."""
    pool = scorers(watched.cluster, "leaves_with_nine")
    pool.score(rollouts())
    pool.close()
    assert watched.incidents() == []


@pytest.mark.parametrize(
    ("on_error", "actions"),
    [("tell", ["failed", "restarted"]), ("end", ["failed", "restarted"]), ("stop", ["gave up"])],
)
def test_the_loss_of_an_environment_is_recorded_with_its_outcome(
    watched: WatchedCluster, on_error: Literal["tell", "end", "stop"], actions: list[str]
) -> None:
    noted: list[tuple[str, str]] = []

    def note(action: str, **fields: object) -> None:
        noted.append((action, str(fields["worker"])))

    config = EnvironmentConfig(path="environments.py:Faulty", workers=1, on_error=on_error)
    pool = EnvironmentPool(watched.cluster, config, HERE, note=note)
    pool.start()
    pool.begin("a", rollouts().groups[0].prompt)
    waits.poll(lambda: pool.collect() or None, kind="queue", waits_for="a", why="reset", timeout_s=20)
    pool.step("a", "exit")
    (reply,) = waits.poll(lambda: pool.collect() or None, kind="queue", waits_for="a", why="reply", timeout_s=20)
    assert reply.failure is not None and "exited with 7" in reply.failure.problem
    assert noted == [(action, "environment-0") for action in actions]
    pool.close()
    assert [each["kind"] for each in watched.incidents(1)] == ["dead"]  # the supervisor's own report remains


def test_a_scorer_that_somebody_else_kills_is_an_incident(watched: WatchedCluster) -> None:
    pool = scorers(watched.cluster, "steady", workers=1)
    pool.score(rollouts())
    (scorer,) = [each for each in read_beacons(watched.run) if each.name == "scorer-0"]
    os.kill(scorer.pid, signal.SIGKILL)
    (verdict,) = watched.incidents(1)
    assert (verdict["kind"], verdict["level"]) == ("dead", "confirmed")
    assert [each["name"] for each in verdict["culprits"]] == ["scorer-0"]
    pool.score(rollouts())
    pool.close()
    assert watched.incidents() == []


JOB = r"""
import os, signal, sys, time
import torch, torch.distributed as dist

dist.init_process_group("gloo")
if len(sys.argv) > 1:  # as a job that writes a checkpoint before it leaves
    signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.5), sys.exit(5)))
os.write(1, b"ready\n")  # in one piece: the other rank writes as well
while True:
    dist.all_reduce(torch.ones(8))
    time.sleep(0.01)
"""


@pytest.mark.parametrize(
    ("number", "handler"),
    [
        (signal.SIGTERM, ()),
        pytest.param(signal.SIGHUP, (), marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, ("handler",), marks=pytest.mark.slow),
    ],
)
def test_a_signal_to_a_watched_command_is_no_incident(
    tmp_path: Path, number: signal.Signals, handler: tuple[str, ...]
) -> None:
    (tmp_path / "job.py").write_text(JOB)
    process = watch(tmp_path, *torchrun(str(tmp_path / "job.py"), *handler))
    assert process.stdout is not None
    assert [process.stdout.readline(), process.stdout.readline()] == ["ready\n"] * 2
    waits.sleep(1.0, "the watcher's first reports")
    process.send_signal(number)
    code, _, errors = finish(process)
    assert code not in (0, STALL_EXIT_CODE)
    assert "confirmed" not in errors and not (tmp_path / "incidents").exists(), errors


@pytest.mark.slow
def test_ctrl_c_in_a_watched_command_is_no_incident(tmp_path: Path) -> None:
    """The terminal sends SIGINT to the command and to the watcher at once."""
    (tmp_path / "job.py").write_text(JOB)
    process = watch(tmp_path, *torchrun(str(tmp_path / "job.py")), start_new_session=True)
    assert process.stdout is not None
    assert [process.stdout.readline(), process.stdout.readline()] == ["ready\n"] * 2
    waits.sleep(1.0, "the watcher's first reports")
    os.killpg(process.pid, signal.SIGINT)
    code, _, errors = finish(process)
    assert code not in (0, STALL_EXIT_CODE)
    assert "confirmed" not in errors and not (tmp_path / "incidents").exists(), errors
