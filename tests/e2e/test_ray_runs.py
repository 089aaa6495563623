"""`lockstep train` with `cluster=ray`: on a private Ray, and on two hosts of a cluster, one of which is lost."""

import os
import re
import signal
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from forked_controller import ENVIRONMENT
from harness import Launched, config, task, write
from needed_systems import needs_namespaces, needs_ray
from test_recovery import wait_for_restarts

from benchmarks.faults.ray_hosts import Hosts, until

pytestmark = [*needs_ray, pytest.mark.slow, pytest.mark.timeout(600)]


def test_a_run_on_a_private_ray(tmp_path: Path) -> None:
    home = task(tmp_path)
    file = write(home, config(home, "grpo", steps=4, cluster={"kind": "ray"}))
    began = time.monotonic()
    launched = Launched.start(home / "runs" / "grpo", str(file), cold=True)
    launched.wait_for("rollout", None)
    print(f"start: {time.monotonic() - began:.1f} s until the first rollout")
    assert launched.finish() == 0, launched.text()
    assert launched.has_ended(20.0), "Ray as well"
    assert "policy-0..1, engine-0, scorer-0" in launched.printed()
    assert "finished after 4 of 4 steps" in launched.printed()


KILLED = ("policy-1", "engine-0", "policy-0", "engine-0", "policy-1", "engine-0")
"""In this order, one recovery each."""


def census(launched: Launched) -> dict[str, tuple[int, int]]:
    """Processes and open file descriptors by kind of process, while steps go by: the least of 20 looks, because a
    connection, or a process that takes stacks, may be there at any moment."""
    looks = []
    for _ in range(20):
        files: dict[str, list[int]] = {}
        for process in launched.remaining():
            with suppress(psutil.Error):
                files.setdefault(kind_of(launched, process), []).append(process.num_fds())
        looks.append({kind: (len(each), sum(each)) for kind, each in files.items()})
        time.sleep(0.2)
    lasting = set.intersection(*(set(look) for look in looks))
    return {kind: (min(look[kind][0] for look in looks), min(look[kind][1] for look in looks)) for kind in lasting}


def kind_of(launched: Launched, process: psutil.Process) -> str:
    """`controller`, `policy`, `engine` and so on by the beacon; of the others the name of their program."""
    for state in launched.beacons():
        if state.pid == process.pid:
            return str(state.role)
    words = process.cmdline()
    modules = [word for word in words if word.startswith("lockstep.") or "ray::" in word or "raylet" in word]
    return Path(modules[0].split()[0] if modules else words[0]).name


@pytest.mark.timeout(1500)
def test_recoveries_leave_no_open_files_and_no_processes(tmp_path: Path) -> None:
    """Of controller, supervisor, agents and Ray after the last recovery as many as after the second one."""
    home = task(tmp_path)
    budget = {"max_restarts": 20}
    changes = {
        "steps": 100_000, "cluster": {"kind": "ray"}, "recovery": {"policy": budget, "rollout": budget},
        "evaluation": None,
    }  # fmt: skip
    file = write(home, config(home, "grpo", **changes))
    launched = Launched.start(home / "runs" / "grpo", str(file), cold=True)
    launched.wait_for("train", 3, 400)
    counts = []
    for number, name in enumerate(KILLED, start=1):
        newest = max(
            (each for each in launched.beacons() if each.name.split(".")[0] == name), key=lambda each: each.pid
        )
        os.kill(newest.pid, signal.SIGKILL)
        wait_for_restarts(launched, number)
        position = launched.position()
        assert position is not None and position.step is not None
        launched.wait_for("train", position.step + 3)
        counts.append(census(launched))
        print(number, name, counts[-1], flush=True)
    assert counts[-1].keys() == counts[1].keys()
    more = {
        kind: now for kind, now in counts[-1].items() if any(a > b for a, b in zip(now, counts[1][kind], strict=True))
    }
    assert more == {}, counts[1]


@needs_namespaces
def test_a_run_continues_without_the_host_of_an_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, hosts = task(tmp_path), Hosts(tmp_path)
    changes = {
        "steps": 40,
        "cluster": {"kind": "ray", "address": hosts.address, "orphan_grace_s": 3.0},
        "placement": {"strategy": "spread"},
        "rollout": {"sampling": {"max_tokens": 4}, "engine": {"max_rows": 32, "threads": 1, "count": 2}},
    }
    file = write(home, config(home, "grpo", **changes))
    try:
        hosts.connect()
        hosts.start_ray(cpus=8)
        for name, value in {**hosts.environment, "LOCKSTEP_BEACONS": str(hosts.shared("a"))}.items():
            monkeypatch.setenv(name, value)
            monkeypatch.setitem(ENVIRONMENT, name, value)
        from lockstep.cluster.ray.ray_nodes import query_nodes
        from lockstep.config.cluster import RayClusterConfig

        until(lambda: len(query_nodes(RayClusterConfig(address=hosts.address))) == 2, 120, "Ray knows both hosts")
        launched = Launched.start(home / "runs" / "grpo", str(file), cold=True)
        launched.wait_for("train", 4)
        hosts.cut()
        cut_at = time.monotonic()
        until(lambda: "is lost" in launched.printed(), 60, "the lost host is reported")
        print(f"reported after {time.monotonic() - cut_at:.1f} s")
        assert launched.finish() == 0, launched.text()
        printed = launched.printed()
        assert "finished after 40 of 40 steps" in printed
        print(re.findall(r".*(?:is lost|replaced|re-issued).*", printed))
    finally:
        hosts.close()
