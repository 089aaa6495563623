"""`lockstep check` of a config for a Ray cluster of two hosts: a task on each node starts its probe."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from needed_systems import needs_namespaces

from benchmarks.faults.ray_hosts import Hosts
from lockstep.models.tiny_model import make_tiny

pytest.importorskip("ray")
pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(400), needs_namespaces]

ROOT = Path(__file__).parents[2]


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    made = Hosts(tmp_path)
    try:
        made.connect()
        made.start_ray()
        made.meet()
        yield made
    finally:
        made.close()


def test_every_node_has_a_probe_and_ranks_follow_the_placement(hosts: Hosts, tmp_path: Path) -> None:
    make_tiny(tmp_path / "model", alphabet="0123456789=", max_length=64)
    subprocess.run([sys.executable, ROOT / "examples" / "sort_data.py", tmp_path / "data"], check=True, timeout=60)
    words = [
        f"model.path={tmp_path}/model", f"data.path={tmp_path}/data/grpo.jsonl", "cluster.kind=ray",
        f"evaluation.data.path={tmp_path}/data/eval.jsonl", f"cluster.address={hosts.address}", "cluster.device=cpu",
        "placement.policy.nodes=2",
    ]  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "lockstep", "check", ROOT / "examples" / "grpo_sort.yaml", *words, "--json"],
        env={**hosts.environment, "HF_HUB_OFFLINE": "1"}, cwd=tmp_path, timeout=240, capture_output=True, text=True,
    )  # fmt: skip
    assert "Traceback" not in done.stderr, done.stderr
    found = json.loads(done.stdout)["findings"]
    joined = [each for each in found if each["rung"] == "rendezvous"]
    assert not [each for each in joined if each["severity"] == "error"], joined
    assert next(each for each in found if each["id"] == "pairs")["severity"] == "ok"
    tried = [each["seen"] for each in found if each["id"] == "collectives"]
    assert len(tried) == 3 and all("all sums correct" in seen for seen in tried)
    placed = next(each["seen"] for each in found if each["rung"] == "placement" and each["severity"] == "ok")
    assert "policy-0" in placed and "policy-1" in placed

    # The cluster's hosts without a config, and with a config for this host only.
    (tmp_path / "sft.yaml").write_text((ROOT / "examples" / "sft_sort.yaml").read_text())
    local = ["sft.yaml", f"model.path={tmp_path}/model", f"data.path={tmp_path}/data/sft.jsonl", "cluster.device=cpu"]
    for more in ([], local):
        done = subprocess.run(
            [sys.executable, "-m", "lockstep", "check", *more, "--cluster", hosts.address, "--json"],
            env={**hosts.environment, "HF_HUB_OFFLINE": "1"}, cwd=tmp_path, timeout=240, capture_output=True, text=True,
        )  # fmt: skip
        assert "Traceback" not in done.stderr, done.stderr
        found = json.loads(done.stdout)["findings"]
        assert next(each for each in found if each["id"] == "pairs")["severity"] == "ok"
        assert "2 of 2 hosts joined" in next(each["seen"] for each in found if each["id"] == "rendezvous")
