"""`lockstep watch -- COMMAND` around real jobs."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import venv
from pathlib import Path

import pytest
import torch

from lockstep.models.tiny_model import make_tiny
from lockstep.watch.attach.watched_command import PAYLOAD, STALL_EXIT_CODE

LOCKSTEP = str(Path(sys.executable).with_name("lockstep"))
JOBS = Path(__file__).with_name("watch_jobs")
ROOT = Path(__file__).parents[2]
QUICK = ("--notice-after", "1", "--confirm-after", "4")
BOUND_S = 120.0


STARTED: "list[subprocess.Popen[str]]" = []
"""The commands that this test has started; `conftest.py` ends those that a failed test leaves."""


def watch(
    folder: Path, *words: str, options: tuple[str, ...] = QUICK, start_new_session: bool = False, **more: str
) -> "subprocess.Popen[str]":
    argv = [LOCKSTEP, "watch", "--incidents", str(folder / "incidents"), *options, "--", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **more}
    pipes = {"stderr": subprocess.PIPE, "stdout": subprocess.PIPE}
    STARTED.append(subprocess.Popen(argv, env=environment, text=True, start_new_session=start_new_session, **pipes))
    return STARTED[-1]


def finish(process: "subprocess.Popen[str]") -> tuple[int, str, str]:
    try:
        out, errors = process.communicate(timeout=BOUND_S)
    except subprocess.TimeoutExpired:
        process.kill()
        out, errors = process.communicate()
        raise AssertionError(f"not finished:\n{out}\n{errors}") from None
    return process.returncode, out, errors


def torchrun(*words: str, ranks: int = 2) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), *words]


def test_a_reward_that_blocks_one_rank_is_named(tmp_path: Path) -> None:
    """The command of the documentation, with an unmodified torchrun script: the notice names rank, line and the
    collective that the others wait in; then the command is ended."""
    documented = re.search(r"^lockstep (watch .*)$", (ROOT / "docs" / "watch-command.md").read_text(), re.MULTILINE)
    assert documented is not None
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    variables = {"PATH": path, "OMP_NUM_THREADS": "1", "NCCL_TIMEOUT": "1800"}
    process = subprocess.Popen(
        [LOCKSTEP, *documented[1].split()], cwd=tmp_path, env={**os.environ, **variables}, text=True,
        stderr=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    code, _, errors = finish(process)
    assert code == STALL_EXIT_CODE, errors
    assert "notice" in errors and "rank 1" in errors, errors
    (file,) = (tmp_path / "incidents").glob("*/verdict.json")
    verdict = json.loads(file.read_text())
    assert verdict["kind"] == "absent"
    assert [each["rank"] for each in verdict["culprits"]] == [1]
    assert "reward" in verdict["culprits"][0]["where"] and "stuck_rank.py" in verdict["culprits"][0]["where"]
    assert verdict["collective"]["operation"] == "all_reduce"
    assert "environment: nothing reads NCCL_TIMEOUT=1800" in errors
    found = json.loads((file.parent / "findings.json").read_text())["environment"]
    assert "env-unread" in [each["id"] for each in found]


@pytest.mark.parametrize(
    ("command", "code"),
    [("exit 0", 0), ("exit 7", 7), ("kill -KILL $$", 128 + signal.SIGKILL), ("kill -TERM $$", 128 + signal.SIGTERM)],
)
def test_the_exit_code_is_the_commands(tmp_path: Path, command: str, code: int) -> None:
    assert finish(watch(tmp_path, "sh", "-c", command))[0] == code
    assert not (tmp_path / "incidents").exists()


@pytest.mark.parametrize(
    ("fault", "how"),
    [
        pytest.param("exits", "exit code 0", marks=pytest.mark.slow),
        ("raises", "exit code 1"),
        pytest.param("killed", "killed by SIGKILL", marks=pytest.mark.slow),
    ],
)
def test_the_first_rank_to_fail_is_named_at_the_end(tmp_path: Path, fault: str, how: str) -> None:
    """Its peers fail within milliseconds, or their launcher ends them, before anybody has waited."""
    job = ROOT / "benchmarks" / "faults" / "attached_job.py"
    (tmp_path / "go").touch()
    code, _, errors = finish(watch(tmp_path, *torchrun(str(job), "plain", fault, "1", str(tmp_path), ranks=3)))
    assert code not in (0, STALL_EXIT_CODE)
    confirmed = [line for line in errors.splitlines() if "lockstep watch: confirmed" in line]
    assert confirmed and all("confirmed: rank 1" in line for line in confirmed) and how in confirmed[-1], errors


def test_a_command_that_does_not_exist(tmp_path: Path) -> None:
    code, _, errors = finish(watch(tmp_path, "no-such-launcher"))
    assert code == 127
    assert "no-such-launcher" in errors


def test_signals_and_output_pass_through(tmp_path: Path) -> None:
    """The command gets SIGTERM and ends by itself; its output is not changed."""
    script = "trap 'echo caught; exit 3' TERM; echo ready; while :; do sleep 0.05; done"
    process = watch(tmp_path, "sh", "-c", script)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    code, out, _ = finish(process)
    assert (code, out) == (3, "caught\n")


def test_killing_the_watcher_does_not_affect_the_command(tmp_path: Path) -> None:
    done = tmp_path / "done"
    process = watch(tmp_path, "sh", "-c", f"echo ready; sleep 1; touch {done}")
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.kill()
    process.communicate()
    deadline = time.monotonic() + 20
    while not done.exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def python(
    folder: Path, code: str, executable: str = sys.executable, **more: str
) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, "PYTHONPATH": f"{PAYLOAD}{os.pathsep}{folder}", "LOCKSTEP_WATCH": "watch-test", **more}
    return subprocess.run([executable, "-c", code], env=environment, text=True, capture_output=True, timeout=60)


def test_another_sitecustomize_still_works(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.theirs = True\n")
    done = python(tmp_path, "import sys, sitecustomize; print(sys.theirs, sitecustomize.__file__)")
    assert done.stdout.split() == ["True", str(tmp_path / "sitecustomize.py")], done.stderr


def test_nothing_is_imported_until_torch_is(tmp_path: Path) -> None:
    done = python(tmp_path, "import sys, json; print([name for name in sys.modules if 'lockstep' in name])")
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_a_failure_of_the_recorder_does_not_fail_the_job(tmp_path: Path) -> None:
    """The folder of the beacons cannot be created."""
    (tmp_path / "file").touch()
    code = "import torch.distributed; print('goes on')"
    done = python(tmp_path, code, RANK="0", LOCAL_RANK="0", LOCKSTEP_BEACONS=str(tmp_path / "file" / "below"))
    assert (done.returncode, done.stdout) == (0, "goes on\n")
    assert "not recorded" in done.stderr


@pytest.mark.slow
def test_a_job_in_an_environment_without_lockstep(tmp_path: Path) -> None:
    """Torch is installed and Lockstep is not: the recorder is found by the command's environment variables."""
    venv.create(tmp_path / "venv", symlinks=True)
    (packages,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    (packages / "torch.pth").write_text(
        f"{Path(torch.__file__).parent.parent}\n"
    )  # .pth files in that folder are not read
    code = (
        "import importlib.util as util; print(util.find_spec('lockstep'))\n"
        "import torch.distributed as dist\n"
        f"dist.init_process_group('gloo', init_method='file://{tmp_path}/store', rank=0, world_size=1)\n"
        "import sys, torch; dist.all_reduce(torch.ones(2))\n"
        "from lockstep.watch.beacon import reader\nfrom lockstep.watch.beacon.writer import current_beacon\n"
        "from lockstep.watch.recorder import recorder\n"
        "state = reader.read_beacon(current_beacon().path)\n"
        "print(state.name, recorder.current() is not None, 'pydantic' in sys.modules)\n"
    )
    done = python(tmp_path, code, str(tmp_path / "venv" / "bin" / "python"), LOCKSTEP_BEACONS=str(tmp_path))
    assert done.stdout.split() == ["None", "rank-0", "True", "False"], done.stderr


def test_torch_imports_its_distributed_module_itself(tmp_path: Path) -> None:
    """The recorder starts when all of torch is imported."""
    fake = tmp_path / "torch"
    (fake / "distributed").mkdir(parents=True)
    (fake / "__init__.py").write_text("import torch.distributed\nimport sys\nfinished = True\n")
    (fake / "distributed" / "__init__.py").write_text("")
    code = (
        "import sys, types\n"
        "enroll = types.ModuleType('lockstep.watch.attach.enroll')\n"
        "enroll.enroll_process = lambda run: print(run, sys.modules['torch'].finished)\n"
        "sys.modules['lockstep.watch.attach.enroll'] = enroll\n"
        "import torch\n"
    )
    assert python(tmp_path, code).stdout.split() == ["watch-test", "True"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_trl_with_a_judge_that_never_answers(tmp_path: Path) -> None:
    """An unmodified TRL script; TRL is installed in the environment of the benchmarks."""
    peer = ROOT / "build" / "peer"
    if not (peer / "trl").is_dir():
        pytest.skip("TRL is not there: script/benchmark installs it into build/peer")
    make_tiny(
        tmp_path / "model", hidden=32, layers=2, heads=2, kv_heads=1, ffn=64, max_length=64, alphabet="0123456789=",
        seed=5,
    )  # fmt: skip
    script = [str(JOBS / "trl_blocked.py"), str(tmp_path / "model"), str(tmp_path / "out")]
    options = ("--on-stall", "kill", "--confirm-after", "8")
    path = os.pathsep.join(filter(None, [str(peer), os.environ.get("PYTHONPATH")]))
    process = watch(tmp_path, *torchrun(*script), options=options, PYTHONPATH=path, HF_HUB_OFFLINE="1")
    code, _, errors = finish(process)
    assert code == STALL_EXIT_CODE, errors
    notices = [line for line in errors.splitlines() if "lockstep watch: notice:" in line]
    assert "rank 1" in notices[0] and "ask_the_judge() at trl_blocked.py" in notices[0], errors
    assert any(f"for {seconds} s" in notices[0] for seconds in (3, 4, 5)), notices[0]
    (file,) = (tmp_path / "incidents").glob("*/verdict.json")
    verdict = json.loads(file.read_text())
    assert (verdict["kind"], [each["rank"] for each in verdict["culprits"]]) == ("absent", [1])
