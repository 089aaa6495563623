"""PPO on a Ray cluster of two hosts, policy on one and critic on the other: a host is lost, and the run ends with the
same models, bit by bit, as on one host that nothing disturbs."""

import re
import time
from pathlib import Path

import pytest
from forked_controller import ENVIRONMENT
from harness import Launched, task, train, write
from needed_systems import needs_namespaces, needs_ray
from resume_scenarios import assert_equal_runs
from test_colocation import make_scorer, settings

from benchmarks.faults.ray_hosts import Hosts

pytestmark = [*needs_ray, pytest.mark.slow, pytest.mark.timeout(900), needs_namespaces]

STEPS = 20
CPUS = {"policy": {"cpus": 1.5}, "critic": {"cpus": 1.0}, "rollout": {"cpus": 0.5}}


@pytest.mark.parametrize("loss", ["cut", "crash"])
def test_the_run_continues_without_the_host_of_the_critic(
    loss: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the critic an engine is lost. Both restart beside the policy, which is kept: whether the host no longer
    answers while its processes run on, or all its processes end at once, Ray's and the node agent among them."""
    home, hosts = task(tmp_path), Hosts(tmp_path)
    make_scorer(home)
    terms = {"terms": [{"kind": "exact_match"}, {"kind": "regex", "pattern": "[0-4].*", "weight": 0.5}], "workers": 1}
    values = settings(home, "alone", steps=STEPS, reference=None, reward=terms, folder=str(tmp_path / "runs"))
    alone = train(home, values)
    spread = {
        **values, "name": "hosts", "placement": {"strategy": "spread", **CPUS},
        "cluster": {"kind": "ray", "address": hosts.address, "orphan_grace_s": 3.0},
    }  # fmt: skip
    file = write(home, spread)
    try:
        hosts.connect()
        hosts.start_ray(cpus=4)
        hosts.meet()
        for name, value in {**hosts.environment, "LOCKSTEP_BEACONS": str(hosts.shared("a"))}.items():
            monkeypatch.setenv(name, value)
            monkeypatch.setitem(ENVIRONMENT, name, value)
        launched = Launched.start(tmp_path / "runs/hosts", str(file), cold=True)
        launched.wait_for("train", 3)
        where = launched.printed()
        assert f"{hosts.other}" in where
        lost = time.monotonic()
        {"cut": hosts.cut, "crash": hosts.end_b}[loss]()
        assert launched.finish(timeout_s=400) == 0, launched.text()
        print(f"{loss}: {time.monotonic() - lost:.1f} s from the loss of the host to the end of the run")
    finally:
        hosts.close()
    assert "critic-0 vanished" in launched.text(), launched.text()
    assert not re.search("policy-0 (vanished|died)", launched.text()), launched.text()
    assert_equal_runs(launched.folder, alone)
