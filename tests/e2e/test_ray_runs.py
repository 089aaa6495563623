"""`lockstep train` with `cluster=ray`: on a private Ray, and on two hosts of a cluster, one of which is lost."""

import re
import time
from pathlib import Path

import pytest
from forked_controller import ENVIRONMENT
from harness import Launched, config, task, write
from needed_systems import needs_namespaces, needs_ray

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
