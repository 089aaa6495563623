"""`lockstep watch` on every node (network namespace) of a job: one supervisor names blocking ranks of all nodes."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from needed_systems import needs_namespaces

from benchmarks.faults.network_namespaces import Cable

LOCKSTEP = str(Path(sys.executable).with_name("lockstep"))
JOB = str(Path(__file__).with_name("watch_jobs") / "training_job.py")
TOKEN = "5f0c2b7be4a8913d6e7f20c1a9d84b36"
BOUND_S = 180.0


@pytest.fixture
def cable() -> Iterator[Cable]:
    with Cable.any("lw", "10.78") as made:
        yield made


def start(folder: Path, cable: Cable, node: int, *words: str) -> "subprocess.Popen[str]":
    """`lockstep watch -- torchrun` on node 0 (here) or 1 (in the namespace)."""
    inside = cable.inside if node else []
    host = cable.here
    watch = [
        LOCKSTEP,
        "watch",
        "--incidents",
        str(folder / f"incidents-{node}"),
        "--notice-after",
        "1",
        "--confirm-after",
        "4",
        "--on-stall",
        "kill",
        "--supervisor",
        f"{host}:29477",
        "--node",
        "ab"[node],
        "--",
    ]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(node),
                "--master-addr", host, "--master-port", "29478", "--nproc-per-node", "1", JOB, *words]  # fmt: skip
    environment = {
        **os.environ, "OMP_NUM_THREADS": "1", "LOCKSTEP_TOKEN": TOKEN, "LOCKSTEP_BEACONS": str(folder / f"shm-{node}"),
        "GLOO_SOCKET_IFNAME": cable.far if node else cable.near,
    }  # fmt: skip
    return subprocess.Popen(
        [*inside, *watch, *torchrun], env=environment, text=True, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL,
        start_new_session=True,
    )  # fmt: skip


@needs_namespaces
@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("fault", ["stuck", "late"])
def test_a_blocking_rank_of_the_other_node_is_named(tmp_path: Path, cable: Cable, fault: str) -> None:
    """With its host and line, on both consoles; and the command ends on both nodes."""
    nodes = [start(tmp_path, cable, node, f"--{fault}", "1") for node in range(2)]
    bound = threading.Timer(BOUND_S, lambda: [os.killpg(each.pid, signal.SIGKILL) for each in nodes])
    bound.start()
    outputs = [each.communicate()[1] for each in nodes]
    bound.cancel()
    line = f"{'ask_the_judge' if fault == 'stuck' else 'load_the_data'}() at {Path(JOB).name}"
    for text in outputs:
        assert "lockstep watch: notice: rank 1 (host b) has not" in text, outputs
        assert line in text, outputs
    assert [each.returncode for each in nodes] == [124, 124], outputs
    verdicts = [json.loads(file.read_text()) for file in (tmp_path / "incidents-0").glob("*/verdict.json")]
    (culprit,) = verdicts[0]["culprits"]
    assert (culprit["rank"], culprit["host"]) == (1, "b")
    assert not (tmp_path / "incidents-1").exists()


@pytest.mark.parametrize(
    ("address", "token", "why"),
    [
        ("127.0.0.1:29477", "short", "LOCKSTEP_TOKEN can be guessed"),
        ("127.0.0.1:many", TOKEN, "expected HOST:PORT"),
        ("no-such-host.invalid:1", TOKEN, "no host"),
    ],
    ids=["short token", "no port", "no host"],
)
def test_refused_before_anything_starts(address: str, token: str, why: str) -> None:
    environment = {**os.environ, "LOCKSTEP_TOKEN": token}
    done = subprocess.run(
        [LOCKSTEP, "watch", "--supervisor", address, "--", "echo", "started"],
        env=environment, text=True, capture_output=True, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert why in done.stderr
