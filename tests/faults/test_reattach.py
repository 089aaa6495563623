"""A controller is killed, and the next one starts within the grace period: it adopts the workers that fit and replaces
the others. The first controller, if it still runs, can do nothing any more."""

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lockstep.base.folders import run_shm_dir
from lockstep.cluster import reattach
from lockstep.cluster.local_cluster import LocalCluster
from lockstep.cluster.protocol import WorkerSpec
from lockstep.cluster.reattach import InheritedAgent, take_over_local_agent
from lockstep.config.cluster import LocalClusterConfig as Config
from lockstep.watch.agent import service_discovery
from lockstep.watch.agent.service_discovery import ServiceAddress
from lockstep.watch.procfs import processes

SERVICES = Path(__file__).parent.parent / "contract"
sys.path.insert(0, str(SERVICES))
from cluster_services import Plain, Renewable  # noqa: E402

CONTROLLER = """
import signal, sys, time
from pathlib import Path
from cluster_services import Renewable
from test_reattach import keep, other, work
from lockstep.cluster.local_cluster import LocalCluster
from lockstep.cluster.reattach import take_over_local_agent
from lockstep.config.cluster import LocalClusterConfig as Config
run, folder, generation, mode, grace_s = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5]
heritage = take_over_local_agent(folder / "cluster", generation, float(grace_s))
with LocalCluster(Config(orphan_grace_s=float(grace_s)), run, folder, generation, inherited=heritage) as cluster:
    workers = cluster.start([keep("keep-0"), keep("keep-1", 1), other()])
    if mode == "waits":
        workers[0].submit(Renewable.work, 2.0)
        time.sleep(0.3)
    print(*(worker.pid for worker in workers), flush=True)
    if mode == "works":
        work(cluster, workers[0])
    else:
        time.sleep(120)
"""

GRACE_S = 60.0


def until(check: Callable[[], object], seconds: float, what: str) -> None:
    started = time.monotonic()
    while not check():
        assert time.monotonic() - started < seconds, f"not within {seconds} s: {what}"
        time.sleep(0.02)


def keep(name: str, rank: int = 0, **arguments: int) -> WorkerSpec:
    environment = {"PYTHONPATH": os.pathsep.join([str(SERVICES), os.environ.get("PYTHONPATH", "")])}
    return WorkerSpec(
        name, "keep", rank, "cluster_services:Renewable", arguments, environment, ("numpy",), adoptable=True
    )


def other() -> WorkerSpec:
    """A worker that the next controller does not adopt."""
    spec = keep("other-0")
    spec.role, spec.service, spec.adoptable = "other", "cluster_services:Plain", False
    return spec


def work(cluster: LocalCluster, worker: object) -> None:
    """Act like a controller that does not know yet that another has the run: call a worker again and again, and start
    another one when it is lost."""
    try:
        while True:
            worker.call(Renewable.add, 1000)  # type: ignore[attr-defined]
            time.sleep(0.02)
    except Exception as error:
        print(type(error).__name__, flush=True)
    try:
        cluster.start([keep("keep-0.1")])
    except Exception as error:
        print(type(error).__name__, str(error).partition("\n")[0], flush=True)


class Site:
    """A run's folder and its controllers."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.run = folder, f"adoption-{secrets.token_hex(3)}"
        self.controllers: list[subprocess.Popen[str]] = []

    def begin(
        self, generation: int = 1, mode: str = "idle", grace_s: float = GRACE_S
    ) -> tuple[subprocess.Popen[str], list[int]]:
        """Start a controller process; returns it and the pids of its workers."""
        words = [self.run, str(self.folder), str(generation), mode, str(grace_s)]
        controller = subprocess.Popen([sys.executable, "-c", CONTROLLER, *words], stdout=subprocess.PIPE, text=True)
        self.controllers.append(controller)
        assert controller.stdout is not None
        return controller, [int(pid) for pid in controller.stdout.readline().split()]

    def take_over(self, generation: int) -> InheritedAgent | None:
        return take_over_local_agent(self.folder / "cluster", generation, GRACE_S)

    @contextmanager
    def successor(self, generation: int = 2) -> Iterator[LocalCluster]:
        """A controller in this process, which takes over from the previous one."""
        heritage = self.take_over(generation)
        assert heritage is not None
        assert heritage.run == self.run
        with LocalCluster(Config(), self.run, self.folder, generation, inherited=heritage) as cluster:
            yield cluster
        assert not run_shm_dir(self.run).exists()

    def agent(self) -> ServiceAddress:
        return ServiceAddress.read(self.folder / "cluster")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    made = Site(tmp_path)
    # Both controllers have the same environment: this process's.
    folders = [str(Path(__file__).parent), str(SERVICES), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(folders))
    yield made
    for controller in made.controllers:
        controller.kill()
        controller.communicate(timeout=20)
    if (tmp_path / "cluster" / "agent.json").exists():
        reattach.kill_previous_agent(tmp_path / "cluster", 99)


def alive(*pids: int) -> list[bool]:
    return [processes.is_alive(pid) for pid in pids]


def kill(controller: "subprocess.Popen[str]") -> None:
    controller.kill()
    controller.wait(20)


def test_requested_workers_are_adopted_and_the_others_end(site: Site) -> None:
    controller, (first, second, third) = site.begin()
    agent = site.agent()
    kill(controller)
    time.sleep(0.5)
    assert alive(first, second, third) == [True] * 3, "they live on for the grace period"
    with site.successor() as cluster:
        assert not processes.is_alive(third), "it is not adopted"
        adopted, fresh = cluster.start([keep("keep-0"), other()])
        assert adopted.pid == first
        assert fresh.pid != third
        assert adopted.call(Renewable.renewed) == 1
        assert adopted.call(Renewable.add, 3) == 3
        assert alive(second) == [True], "it may still be requested"
        cluster.release()
        assert alive(second) == [False]
        (again,) = cluster.start([keep("keep-1", 1)])
        assert again.call(Renewable.renewed) == 0
        assert site.agent().pid == agent.pid
    until(lambda: not any(alive(first, agent.pid)), 10, "all end with the second controller")


def test_workers_that_do_not_fit_or_do_not_answer_are_replaced(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reattach, "ADOPTION_STALL_S", 1.5)
    controller, (first, second, _) = site.begin()
    kill(controller)
    os.kill(second, signal.SIGSTOP)
    with site.successor() as cluster:
        other_arguments, stopped = cluster.start([keep("keep-0", start=5), keep("keep-1", 1)])
        assert other_arguments.pid != first
        assert other_arguments.call(Plain.add, 0) == 5
        assert stopped.pid != second
        assert stopped.call(Plain.add, 1) == 1
        assert alive(first, second) == [False, False]


def test_a_worker_in_a_call_is_adopted_when_the_call_ends(site: Site) -> None:
    controller, (first, *_) = site.begin(mode="waits")
    kill(controller)
    with site.successor() as cluster:
        (adopted,) = cluster.start([keep("keep-0")])
        assert adopted.pid == first
        assert adopted.call(Renewable.add, 1) == 1, "earlier requests are dropped"
        assert adopted.call(Renewable.renewed) == 1


def test_several_controllers_one_after_the_other(site: Site) -> None:
    """Replaced workers have the same names in every generation."""
    kept, replaced = None, set()
    for generation in (1, 2, 3):
        controller, (first, second, third) = site.begin(generation)
        kept = kept or (first, second)
        assert (first, second) == kept
        replaced.add(third)
        kill(controller)
    assert len(replaced) == 3
    with site.successor(4) as cluster:
        assert [worker.pid for worker in cluster.start([keep("keep-1", 1), keep("keep-0")])] == [*reversed(kept or ())]


def test_after_the_grace_period_no_worker_is_left(site: Site) -> None:
    controller, workers = site.begin(grace_s=0.5)
    agent = site.agent()
    kill(controller)
    until(lambda: not any(alive(agent.pid, *workers)), 15, "all have ended")
    assert site.take_over(2) is None
    with LocalCluster(Config(), f"{site.run}-2", site.folder, 2) as cluster:
        (fresh,) = cluster.start([keep("keep-0")])
        assert fresh.call(Renewable.renewed) == 0


def test_an_agent_that_shuts_down_is_not_taken_over(site: Site) -> None:
    controller, workers = site.begin()
    agent = site.agent()
    os.kill(workers[0], signal.SIGSTOP)  # the agent waits for it a while
    kill(controller)
    os.kill(agent.pid, signal.SIGTERM)
    time.sleep(0.6)
    assert processes.is_alive(agent.pid)
    assert site.take_over(2) is None
    with LocalCluster(Config(), f"{site.run}-2", site.folder, 2):
        assert not any(alive(agent.pid, *workers))


def test_changed_code_is_loaded_again(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    controller, workers = site.begin()
    kill(controller)
    monkeypatch.setattr(reattach, "changed_since", lambda wall: "torch/__init__.py")
    assert site.take_over(2) is None
    with LocalCluster(Config(), f"{site.run}-2", site.folder, 2):
        assert not any(alive(*workers))


def test_a_resumed_controller_that_was_superseded_can_do_nothing(site: Site) -> None:
    controller, (first, *_) = site.begin(mode="works")
    agent = site.agent()
    controller.send_signal(signal.SIGSTOP)
    with site.successor() as cluster:
        (adopted,) = cluster.start([keep("keep-0")])
        assert adopted.pid == first
        assert adopted.call(Renewable.add, 1) == 1
        controller.send_signal(signal.SIGCONT)
        output, _ = controller.communicate(timeout=30)
        assert output.splitlines()[0] == "WorkerDied"
        assert output.splitlines()[1].startswith("AgentGone start: generation 1 of")
        assert "generation 2 has taken it over" in output
        assert adopted.call(Renewable.add, 1) == 2, "none of its calls was executed"
        assert site.agent() == agent and processes.is_alive(agent.pid)
        assert service_discovery.is_superseded(site.run, 1) and not service_discovery.is_superseded(site.run, 2)
        with pytest.raises(service_discovery.Superseded):
            service_discovery.Leader(1, "127.0.0.1", 1, os.getpid(), None, 0.0).publish(site.run)
        (fresh,) = cluster.start([keep("keep-7", 7)])
        assert fresh.alive()
