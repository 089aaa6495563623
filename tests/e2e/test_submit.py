"""Runs as jobs of a real Ray: their output is shown, and their exit code is returned."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from needed_systems import needs_ray
from typer.testing import CliRunner

from lockstep.cli import app
from lockstep.cluster.ray.ray_jobs import RayJob, SubmissionError, follow_job, submit_job
from lockstep.models.tiny_model import make_tiny

pytestmark = [*needs_ray, pytest.mark.slow, pytest.mark.timeout(600)]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """The address of the dashboard of a Ray head that runs for this module."""
    port, binaries = free_port(), Path(sys.executable).parent
    folder = tempfile.mkdtemp(prefix="ls", dir="/tmp")  # a short path, because it contains Ray's sockets
    environment = {
        **os.environ, "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1",
        "PATH": f"{binaries}:{os.environ['PATH']}",
    }  # fmt: skip
    environment.pop("RAY_ADDRESS", None)
    os.environ["RAY_AUTH_MODE"] = "disabled"
    command = [
        str(binaries / "ray"), "start", "--head", "--block", "--num-cpus=4", f"--port={free_port()}",
        "--node-ip-address=127.0.0.1", "--dashboard-host=127.0.0.1", f"--dashboard-port={port}",
        "--include-dashboard=true", "--object-store-memory=100000000", f"--temp-dir={folder}",
    ]  # fmt: skip
    log = Path(folder) / "head.log"
    with log.open("w") as out:
        head = subprocess.Popen(command, env=environment, stdout=out, stderr=out, start_new_session=True)
    try:
        url = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + 240
        while not answers(url):
            assert head.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.5)
        yield url
    finally:
        os.killpg(head.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            head.wait(timeout=5)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(head.pid, signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)
        del os.environ["RAY_AUTH_MODE"]


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/api/jobs/", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def test_log_and_exit_code_are_returned(address: str, tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(
        "import os, sys\nprint('in', sorted(os.listdir('.')), os.environ['NCCL_DEBUG'], flush=True)\n"
        "for n in range(300): print('line', n)\nsys.exit(int(sys.argv[1]))\n"
    )
    lines: list[str] = []
    job = submit_job(address, "ends", "python job.py 0", tmp_path, {"NCCL_DEBUG": "WARN"})
    assert job.id.startswith("ends-")
    assert follow_job(job, lines.append).exit_code == 0
    text = "".join(lines)
    assert "in ['job.py'] WARN" in text and text.count("line 299\n") == 1
    failed = follow_job(submit_job(address, "fails", "python job.py 3", tmp_path, {"NCCL_DEBUG": "WARN"}), lines.append)
    assert (failed.status, failed.exit_code) == ("FAILED", 3)


def test_a_job_is_stopped_by_another_command(address: str, tmp_path: Path) -> None:
    from ray.job_submission import JobSubmissionClient

    job = submit_job(address, "long", "python -u -c 'import time; print(\"up\"); time.sleep(300)'", None, {})
    stopped = threading.Event()

    def emit(text: str) -> None:
        if "up" in text and not stopped.is_set():
            stopped.set()
            JobSubmissionClient(job.address).stop_job(job.id)

    assert follow_job(job, emit).status == "STOPPED"


def test_ctrl_c_detaches_from_the_job(address: str, tmp_path: Path) -> None:
    """As with `ray job submit`."""
    from ray.job_submission import JobSubmissionClient

    make_files(tmp_path)
    command = [sys.executable, "-u", "-m", "lockstep", "train", "run.yaml", "steps=100000", "--submit", address]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    line = ""
    while not line.startswith("step 1/"):
        line = process.stdout.readline()
        assert line, process.communicate(timeout=10)
    process.send_signal(signal.SIGINT)
    _, printed = process.communicate(timeout=60)
    assert process.returncode == 130 and "the job continues" in printed and "ray job stop" in printed, printed
    name = printed.split("job small-")[1].split()[0]
    client = JobSubmissionClient(address)
    assert client.get_job_status(f"small-{name}").value == "RUNNING"
    client.stop_job(f"small-{name}")
    assert follow_job(RayJob(address, f"small-{name}"), lambda text: None).status == "STOPPED"


def make_files(folder: Path) -> Path:
    """Write a config and the files that it names into the folder."""
    make_tiny(folder / "model", hidden=16, layers=1, heads=2, kv_heads=1, ffn=32, max_length=32, alphabet="0123456789=")
    (folder / "data.jsonl").write_text('{"prompt": "1=", "answer": "1"}\n' * 8)
    values = {
        "recipe": "grpo", "name": "small", "folder": str(folder / "runs"), "steps": 2, "token_budget": 64,
        "prompts_per_step": 2, "group_size": 2, "model": {"path": "model"}, "data": {"path": "data.jsonl"},
        "rollout": {"sampling": {"max_tokens": 4}}, "trainer": {"threads": 1},
        "reward": {"terms": [{"kind": "exact_match"}], "workers": 1},
        "cluster": {"kind": "ray", "device": "cpu", "orphan_grace_s": 0},
    }  # fmt: skip
    (folder / "run.yaml").write_text(yaml.safe_dump(values))
    return folder / "run.yaml"


def test_a_refusal_of_the_run_is_the_commands_exit_code(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run's folder exists already, so the job refuses to start."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_TOKEN", "hf_" + "a1B2c3D4" * 4)
    make_files(tmp_path)
    (tmp_path / "runs" / "small").mkdir(parents=True)
    result = CliRunner().invoke(app, ["train", "run.yaml", "--submit", address])
    assert result.exit_code == 2, result.output
    assert "refused" in result.output and "exists" in result.output
    assert "not forwarding HF_TOKEN" in result.stderr


def test_a_run_succeeds_and_one_that_does_not_fit_is_refused(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run is uploaded, planned on the cluster's nodes and trained there; its folder is where the config says."""
    monkeypatch.chdir(tmp_path)
    make_files(tmp_path)
    refused = CliRunner().invoke(app, ["train", "run.yaml", "trainer.ranks=9", "--submit", address])
    assert refused.exit_code == 2 and "Would fit: trainer.ranks=2" in refused.output, refused.output
    result = CliRunner().invoke(app, ["train", "run.yaml", "placement.rollout.cpus=0.5", "--submit", address])
    assert result.exit_code == 0, result.output
    assert "finished" in result.output and "policy-0, engine-0, scorer-0" in result.output, result.output
    assert (tmp_path / "runs" / "small" / "export" / "model.safetensors").is_file()


def test_no_cluster_at_the_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SubmissionError, match="nothing listens at"):
        submit_job("http://127.0.0.1:1", "x", "true", None, {})
    with pytest.raises(SubmissionError):
        follow_job(RayJob("http://127.0.0.1:1", "x"), print)
