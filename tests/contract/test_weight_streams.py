"""Weight streams between devices, tested without devices: real processes, gloo in place of NCCL and files in place of
CUDA IPC. The rest of the code is the same as on GPUs."""

import itertools
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from stream_endpoints import EngineEnd, TrainerEnd, expected, plan
from weight_nodes import new_cluster

from lockstep.cluster.local_cluster import LocalCluster
from lockstep.cluster.protocol import RemoteError, Worker, WorkerSpec
from lockstep.run.weight_sync import MAX_MISSED_VERSIONS, ChannelSettings, DeviceWeightSync
from lockstep.weights.weight_plan import WeightPlan

NUMBERS = itertools.count()
WAYS = ("nccl", "cuda_ipc")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with new_cluster(tmp_path_factory.mktemp("cluster")) as made:
        yield made


class StreamSetup:
    """Trainer ranks, engines and the controller's side. With CUDA IPC every engine is on a rank's GPU."""

    def __init__(self, cluster: LocalCluster, folder: Path, way: str, ranks: int, limit_s: float) -> None:
        self.cluster, self.folder, self.way, self.world = cluster, folder, way, ranks
        self.started: list[Worker] = []
        self.number = next(NUMBERS)
        trainers = [self.trainer(rank) for rank in range(ranks)]
        self.ranks = cluster.start(trainers)
        self.started += self.ranks
        store = cluster.store()
        terms = ChannelSettings(way, store, f"stage{self.number}", "gloo", 1, 40_000, "complete", limit_s)
        self.sync = DeviceWeightSync(SimpleNamespace(workers=self.ranks), plan(), terms)

    def _spec(self, name: str, role: str, service: str, arguments: dict[str, Any]) -> WorkerSpec:
        path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
        environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        return WorkerSpec(
            name, role, 0, f"stream_endpoints:{service}", arguments, environment, ("torch", "stream_endpoints")
        )

    def trainer(self, rank: int) -> WorkerSpec:
        arguments = {
            "rank": rank, "world": self.world, "store": self.cluster.store(), "prefix": f"trainer{self.number}",
            "folder": str(self.folder), "gpu": f"gpu-{rank}",
        }  # fmt: skip
        return self._spec(f"policy-{self.number}-{rank}", "policy", "TrainerEnd", arguments)

    def engine(self, gpu: int = 0) -> Worker:
        name = f"engine-{self.number}-{next(NUMBERS)}"
        arguments = {"name": name, "folder": str(self.folder), "gpu": f"gpu-{gpu}"}
        (made,) = self.cluster.start([self._spec(name, "rollout", "EngineEnd", arguments)])
        self.started.append(made)
        return made

    def interrupt_publish(
        self, engine: Worker, version: int, engines: list[Worker], act: Any
    ) -> tuple[list[Worker], float]:
        """Publish, and call `act` while the engine is in the middle of receiving. Returns the engines that have the
        version, and the duration."""
        hold, half = self.folder / f"hold-{engine.spec.name}", self.folder / f"half-{engine.spec.name}"
        hold.touch()
        answers: list[list[Worker]] = []
        began = time.monotonic()
        thread = threading.Thread(target=lambda: answers.append(self.sync.publish(version, engines)), daemon=True)
        thread.start()
        while not half.exists():
            assert time.monotonic() < began + 60
            time.sleep(0.005)
        act(engine.pid)
        hold.unlink()
        thread.join(120)
        assert answers, "the publish did not end"
        return answers[0], time.monotonic() - began


@pytest.fixture
def stage(cluster: LocalCluster, tmp_path: Path) -> Iterator[Any]:
    made: list[StreamSetup] = []

    def one(way: str = "nccl", ranks: int = 2, limit_s: float = 20.0) -> StreamSetup:
        made.append(StreamSetup(cluster, tmp_path, way, ranks, limit_s))
        return made[-1]

    yield one
    for each in made:
        for worker in each.started:
            cluster.stop(worker, grace_s=0.0)


def has(engine: Worker) -> dict[str, str]:
    found: dict[str, str] = engine.submit(EngineEnd.has).result(why="what it has")
    return found


@pytest.mark.parametrize("way", WAYS)
def test_engines_receive_the_weights_of_two_ranks(stage: Any, way: str) -> None:
    there = stage(way)
    engines = [there.engine(0), there.engine(1)]
    for version in (0, 1, 2):
        assert there.sync.publish(version, engines) == engines
        for engine in engines:
            assert has(engine) == expected(version)
    for found in [rank.submit(TrainerEnd.full_digests) for rank in there.ranks]:
        assert found.result(why="torch's own gather") == expected(2)


@pytest.mark.parametrize("way", WAYS)
def test_one_rank_and_an_engine_that_joins_late(stage: Any, way: str) -> None:
    there = stage(way, ranks=1)
    first = there.engine()
    assert there.sync.publish(1, [first]) == [first]
    late = there.engine()
    assert there.sync.publish(2, [first, late]) == [first, late]
    assert has(first) == has(late) == expected(2)


def test_an_engine_that_is_killed_in_the_middle_is_left_out(stage: Any) -> None:
    there = stage(limit_s=5.0)
    victim, other = there.engine(), there.engine()
    assert there.sync.publish(0, [victim, other]) == [victim, other]
    taken, seconds = there.interrupt_publish(victim, 1, [victim, other], lambda pid: os.kill(pid, signal.SIGKILL))
    assert taken == [other] and seconds < 60
    assert has(other) == expected(1)
    fresh = there.engine()
    assert there.sync.publish(2, [other, fresh]) == [other, fresh]
    assert has(other) == has(fresh) == expected(2)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_a_stopped_engine_does_not_hold_up_others_for_long(stage: Any, way: str) -> None:
    there = stage(way, limit_s=3.0)
    slow, other = there.engine(), there.engine()
    assert there.sync.publish(0, [slow, other]) == [slow, other]
    taken, seconds = there.interrupt_publish(slow, 1, [slow, other], lambda pid: os.kill(pid, signal.SIGSTOP))
    assert taken == [other] and seconds < 90
    assert has(other) == expected(1)
    os.kill(slow.pid, signal.SIGCONT)
    assert has(slow) in (
        expected(0),
        expected(1),
    )  # complete or empty: all buckets may have arrived before the sender gave up
    assert there.sync.publish(2, [slow, other]) == [slow, other]
    assert has(slow) == has(other) == expected(2)


@pytest.mark.slow
def test_an_engine_that_never_joins_is_not_tried_again(stage: Any) -> None:
    there = stage(limit_s=1.0)
    other, absent = there.engine(), there.engine()
    os.kill(absent.pid, signal.SIGSTOP)
    for version in range(MAX_MISSED_VERSIONS):
        assert there.sync.publish(version, [other, absent]) == [other]
    began = time.monotonic()
    assert there.sync.publish(MAX_MISSED_VERSIONS, [other, absent]) == [other]
    assert time.monotonic() - began < 30
    assert has(other) == expected(MAX_MISSED_VERSIONS)


def test_an_engine_that_expects_other_tensors_is_refused_before_bytes_move(stage: Any) -> None:
    there = stage(ranks=1)
    engine = there.engine()
    there.sync._plan = WeightPlan.of([("embed", (601, 64), "float32")]).to_json()
    with pytest.raises(RemoteError, match="weight plans of trainer and engine differ"):
        there.sync.publish(0, [engine])
    assert has(engine) == {}
