"""`lockstep watch` around installed launchers, and substitutes for others: ranks that block or never join the
rendezvous are named with their line of code."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

LOCKSTEP = str(Path(sys.executable).with_name("lockstep"))
JOBS = Path(__file__).with_name("watch_jobs")
JOB, STANDIN = str(JOBS / "training_job.py"), str(JOBS / "launcher_stub.py")
OPTIONS = ("--notice-after", "1", "--confirm-after", "4")
BOUND_S = 150.0
ACCELERATE = Path(sys.executable).with_name("accelerate")


@dataclass(frozen=True)
class Outcome:
    code: int
    notice: str
    """The last notice before a confirmed verdict: the first one may be printed before the stack is read."""
    verdict: dict[str, object]
    """The first confirmed verdict."""
    errors: str


def free_port() -> str:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return str(found.getsockname()[1])


def python(*words: str) -> list[str]:
    return [sys.executable, *words]


def torchrun(*words: str) -> list[str]:
    return python("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *words)


def standin(kind: str, *words: str, ranks: int = 2) -> list[str]:
    return python(STANDIN, kind, str(ranks), "--", *python(*words))


def below(process: "subprocess.Popen[str]") -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def kill(processes: list[psutil.Process]) -> None:
    for each in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()


def watch_until_confirmed(folder: Path, command: list[str]) -> Outcome:
    """Run the command, and end it as soon as a verdict is confirmed."""
    argv = [LOCKSTEP, "watch", "--incidents", str(folder / "incidents"), *OPTIONS, "--", *command]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PATH": path, "MASTER_PORT": free_port()}
    process = subprocess.Popen(argv, env=environment, text=True, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL)
    assert process.stderr is not None
    bound = threading.Timer(BOUND_S, lambda: kill([*below(process), psutil.Process(process.pid)]))
    bound.start()
    lines = []
    for line in process.stderr:
        lines.append(line)
        if "lockstep watch: confirmed" in line:
            break
    started = below(process)
    process.send_signal(signal.SIGTERM)
    code = process.wait(60)
    kill(started)  # an ended command leaves its children, with or without lockstep watch
    errors = "".join(lines) + process.stderr.read()
    bound.cancel()
    files = sorted((folder / "incidents").glob("*/verdict.json"))
    assert files, errors
    notices = "".join(line for line in lines if "lockstep watch: notice" in line)
    return Outcome(code, notices, json.loads(files[0].read_text()), errors)


def ranks_of(outcome: Outcome) -> list[object]:
    culprits = outcome.verdict["culprits"]
    assert isinstance(culprits, list)
    return [each["rank"] for each in culprits]


def all_slow_but(quick: str, names: Iterable[str]) -> list[Any]:
    return [name if name == quick else pytest.param(name, marks=pytest.mark.slow) for name in names]


BLOCKED: dict[str, Callable[[str], list[str]]] = {
    "torch-spawn": lambda port: python(JOB, "--how", "torch-spawn", "--port", port),
    "spawn": lambda port: python(JOB, "--how", "spawn", "--port", port),
    "fork": lambda port: python(JOB, "--how", "fork", "--port", port),
    "forkserver": lambda port: python(JOB, "--how", "forkserver", "--port", port),
    "shell": lambda port: ["sh", "-c", " ".join(torchrun(JOB)) + ' "$@"; exit $?', "sh"],
    "accelerate": lambda port: [str(ACCELERATE), "launch", "--multi_gpu", "--num_processes", "2", JOB],
    "mpirun": lambda port: standin("mpirun", JOB, "--how", "mpi", "--port", port),
    "hydra": lambda port: standin("hydra", JOB, "--how", "pmi", "--port", port),
    "srun": lambda port: standin("srun", JOB, "--how", "slurm", "--port", port),
    "deepspeed": lambda port: standin("deepspeed", JOB),
    "srun-torchrun": lambda port: standin("srun", *torchrun(JOB)[1:], ranks=1),
    "kubeflow-torchrun": lambda port: standin("kubeflow", *torchrun(JOB)[1:], ranks=1),
}


@pytest.mark.parametrize("launcher", all_slow_but("fork", BLOCKED))
@pytest.mark.timeout(300)
def test_a_blocking_rank_is_named_with_its_line(tmp_path: Path, launcher: str) -> None:
    outcome = watch_until_confirmed(tmp_path, [*BLOCKED[launcher](free_port()), "--stuck", "1"])
    assert "rank 1" in outcome.notice, outcome.errors
    assert "ask_the_judge() at training_job.py" in outcome.notice, outcome.errors
    assert (outcome.verdict["kind"], ranks_of(outcome)) == ("absent", [1]), outcome.errors
    collective = outcome.verdict["collective"]
    assert isinstance(collective, dict)
    assert (collective["operation"], collective["seq"]) == ("all_reduce", 6)


LATE: dict[str, Callable[[str], list[str]]] = {
    "torchrun": lambda port: torchrun(JOB),
    "spawn": lambda port: python(JOB, "--how", "spawn", "--port", port),
    "mpirun": lambda port: standin("mpirun", JOB, "--how", "mpi", "--port", port),
}


@pytest.mark.parametrize("launcher", all_slow_but("torchrun", LATE))
@pytest.mark.timeout(300)
def test_a_rank_that_never_joins_the_rendezvous(tmp_path: Path, launcher: str) -> None:
    """The rank exists and does something else: its line is named."""
    outcome = watch_until_confirmed(tmp_path, [*LATE[launcher](free_port()), "--late", "1"])
    assert "rank 1 " in outcome.notice, outcome.errors
    assert "has not joined the rendezvous of 2 ranks; it has been in load_the_data() at training_job.py" in (
        outcome.notice
    ), outcome.errors
    assert (outcome.verdict["class"], ranks_of(outcome)) == ("rendezvous_incomplete", [1]), outcome.errors


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_rank_that_has_not_imported_torch(tmp_path: Path) -> None:
    """The recorder has not started in it yet."""
    outcome = watch_until_confirmed(tmp_path, torchrun(JOB, "--late-import"))
    assert "rank 1 " in outcome.notice
    assert "<module> at training_job.py" in outcome.notice, outcome.errors
    assert (outcome.verdict["class"], ranks_of(outcome)) == ("rendezvous_incomplete", [1]), outcome.errors


@pytest.mark.timeout(300)
def test_a_rank_that_was_never_started(tmp_path: Path) -> None:
    command = python(JOB, "--how", "fork", "--ranks", "2", "--world", "3", "--port", free_port())
    outcome = watch_until_confirmed(tmp_path, command)
    assert "rank 2 has not joined the rendezvous of 3 ranks; no such process is known" in outcome.notice
    assert (outcome.verdict["class"], ranks_of(outcome)) == ("rendezvous_incomplete", [2]), outcome.errors
    assert outcome.verdict["confidence"] == 0.7


@pytest.mark.parametrize("how", ["alone", "fork"])
def test_a_healthy_job_is_not_disturbed(tmp_path: Path, how: str) -> None:
    argv = [LOCKSTEP, "watch", "--incidents", str(tmp_path / "incidents"), *OPTIONS, "--"]
    words = python(JOB, "--how", how, "--steps", "20" if how == "fork" else "2", "--port", free_port())
    done = subprocess.run(
        [*argv, *words], env={**os.environ, "OMP_NUM_THREADS": "1"}, text=True, capture_output=True, timeout=BOUND_S
    )
    assert (done.returncode, "confirmed" in done.stderr) == (0, False), done.stderr
    assert not (tmp_path / "incidents").exists()


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("launcher", ["torch-spawn", "mpirun"])
def test_a_stalled_command_is_ended_with_all_its_processes(tmp_path: Path, launcher: str) -> None:
    port = free_port()
    argv = [LOCKSTEP, "watch", "--incidents", str(tmp_path / "incidents"), *OPTIONS, "--on-stall", "kill", "--"]
    done = subprocess.run(
        [*argv, *BLOCKED[launcher](port), "--stuck", "1"], env={**os.environ, "OMP_NUM_THREADS": "1"}, text=True,
        capture_output=True, timeout=BOUND_S,
    )  # fmt: skip
    assert done.returncode == 124, done.stderr
    (file,) = (tmp_path / "incidents").glob("*/verdict.json")
    assert [each["rank"] for each in json.loads(file.read_text())["culprits"]] == [1]
    left = [each for each in psutil.process_iter(["cmdline"]) if port in (each.info["cmdline"] or ())]
    assert left == []


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("launcher", ["torchrun", "deepspeed", "fork"])
def test_the_exit_code_of_a_launcher_is_kept(tmp_path: Path, launcher: str) -> None:
    """With a script that fails on each rank, and one whose failure multiprocessing does not report."""
    forked = "p = m.get_context('fork').Process(target=exit, args=(7,)); p.start(); p.join(); exit(p.exitcode)"
    commands = {
        "torchrun": torchrun(JOB, "--how", "nonsense"),
        "deepspeed": standin("deepspeed", JOB, "--nonsense"),
        "fork": python("-c", f"import multiprocessing as m; {forked}"),
    }
    watched = [LOCKSTEP, "watch", "--incidents", str(tmp_path / "incidents"), *OPTIONS, "--", *commands[launcher]]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    codes = [
        subprocess.run(words, env=environment, capture_output=True, timeout=BOUND_S).returncode
        for words in (commands[launcher], watched)
    ]
    assert codes == [{"torchrun": 1, "deepspeed": 2, "fork": 7}[launcher]] * 2
