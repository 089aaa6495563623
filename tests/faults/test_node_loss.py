"""The agent of a node dies or stops during a request: the caller may continue on another node."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from lockstep.base.folders import new_run_id

sys.path.insert(0, str(Path(__file__).parents[1] / "contract"))
from cluster_services import Plain

from lockstep.cluster import agent_cluster
from lockstep.cluster.local_cluster import LocalCluster
from lockstep.cluster.protocol import WorkerDied, WorkerSpec
from lockstep.config.cluster import LocalClusterConfig as Config
from lockstep.config.reward import FunctionReward, RewardConfig
from lockstep.config.rollout import EnvironmentConfig
from lockstep.data.samples import Completion, Group, Prompt, Rollouts
from lockstep.rewards.scorer_pool import ScorerPool
from lockstep.rollout.environments.environment_pool import MAX_LOST_PROCESSES, EnvironmentPool, EpisodeReply
from lockstep.watch.agent.agent_client import AgentClient


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalCluster]:
    paths = [str(Path(__file__).parents[1] / "contract"), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    with LocalCluster(Config(device="cpu"), new_run_id("dying"), tmp_path / "run", 1) as made:
        yield made


def agent_of(cluster: LocalCluster) -> AgentClient:
    agent = cluster._node.agent
    assert agent is not None
    return agent


def until(there: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not there():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_if_an_agent_dies_while_it_starts_a_worker_the_worker_is_lost(cluster: LocalCluster) -> None:
    agent, found = agent_of(cluster), []

    def start() -> None:
        try:
            cluster.start([WorkerSpec("a", "tester", 0, "cluster_services:Plain")])
        except WorkerDied as error:
            found.append(error)

    os.kill(agent.address.pid, signal.SIGSTOP)  # the request is not carried out
    thread = threading.Thread(target=start, daemon=True)
    thread.start()
    until(lambda: any(operation == "spawn" for _, operation, _ in list(agent._requests.values())))
    os.kill(agent.address.pid, signal.SIGKILL)
    thread.join(30)
    assert [error.worker for error in found] == ["a"] and found[0].exit_code is None
    (again,) = cluster.start([WorkerSpec("a.1", "tester", 0, "cluster_services:Plain")])
    assert again.call(Plain.add, 3) == 3, "with another agent"


def test_a_worker_that_does_not_end_when_killed_holds_up_nothing_else(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Like a process in a call of a GPU driver; here the agent cannot report the end."""
    (worker,) = cluster.start([WorkerSpec("a", "tester", 0, "cluster_services:Plain")])
    agent = agent_of(cluster)
    monkeypatch.setattr(agent_cluster, "KILL_TIMEOUT_S", 0.3)
    monkeypatch.setattr(agent, "_timeout_s", 0.3)
    os.kill(agent.address.pid, signal.SIGSTOP)
    try:
        assert not cluster.kill("a"), "the caller continues as well"
        cluster.stop(worker, grace_s=0.0)
    finally:
        os.kill(agent.address.pid, signal.SIGCONT)
    assert "a (pid" in caplog.text and "still runs 0.3 s after SIGKILL" in caplog.text
    assert worker.dead  # type: ignore[attr-defined]


def test_a_sample_is_not_blamed_for_the_loss_of_a_node(cluster: LocalCluster, tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    path = tmp_path / "mine.py"
    path.write_text(
        "import time\nfrom pathlib import Path\n"
        "def waits(data_source, solution_str, ground_truth, extra_info=None):\n"
        f"    first = not Path({str(begun)!r}).exists()\n"
        f"    Path({str(begun)!r}).touch()\n"
        "    while first:\n        time.sleep(0.01)\n"
        "    return 1.0\n"
    )
    pool = ScorerPool(cluster, RewardConfig(terms=(FunctionReward(path="mine.py:waits"),), timeout_s=60.0), tmp_path)
    pool.start()
    done: list[Rollouts] = []
    thread = threading.Thread(target=lambda: done.append(pool.score(one())), daemon=True)
    thread.start()
    until(begun.exists)
    os.kill(agent_of(cluster).address.pid, signal.SIGKILL)
    thread.join(60)
    (found,) = done
    assert found.groups[0].rewards is not None and found.groups[0].rewards.tolist() == [1.0]
    pool.close()


def test_a_conversation_is_not_blamed_for_the_loss_of_nodes(cluster: LocalCluster) -> None:
    """More nodes are lost than processes may die before a conversation is blamed. A conversation that is alone in its
    process would be blamed at once."""
    pool = EnvironmentPool(
        cluster, EnvironmentConfig(path="environments.py:Slow", timeout_s=60.0), Path(__file__).parent
    )
    pool.start()
    pool.begin("a", Prompt("0:7", 7, np.arange(3, dtype=np.int32), "say ok: ", None, "ok"))
    pool.step("a", "2.5")
    found: list[EpisodeReply] = []

    def asked() -> bool:
        found.extend(pool.collect())
        (host,) = pool._processes
        return bool(host.open) and host._calls == []

    for _ in range(MAX_LOST_PROCESSES):
        until(asked)
        (host,) = pool._processes
        before = host._latest
        os.kill(agent_of(cluster).address.pid, signal.SIGKILL)
        until(lambda before=before: asked() and pool._processes[0]._latest != before)  # type: ignore[misc]
    until(lambda: bool(asked() or found) and bool(found))
    assert [reply.failure for reply in found] == [None] and found[0].observation is not None
    assert found[0].observation.text == "waited 2.5"
    pool.close()


def one() -> Rollouts:
    prompt = Prompt("0:0", 0, np.arange(2, dtype=np.int32), "say ok: ", None, "ok", {"data_source": "test"})
    done = Completion("r", np.arange(2, dtype=np.int32), np.zeros(2, np.float32), np.zeros(2, np.int32), "stop", "ok")
    return Rollouts(1, 1, [Group(prompt, [done])])
