"""A run folder that somebody else has prepared: it names processes to kill, and leads writes to elsewhere."""

import json
import os
import secrets
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch
from harness import config, task, write
from other_user import ATTACKER, needs_root, public_folder

from lockstep.base.folders import make_run_shm_dir, new_run_id, run_shm_dir
from lockstep.cluster import reattach
from lockstep.cluster.local_cluster import LocalCluster
from lockstep.cluster.reattach import kill_previous_agent, take_over_local_agent
from lockstep.config.cluster import LocalClusterConfig
from lockstep.config.loader import check_config
from lockstep.ledger.durable_files import replace_file
from lockstep.ledger.ledger import Ledger
from lockstep.report.metric_sinks import open_sinks
from lockstep.run.run_id import claim_run_id, read_run_id
from lockstep.train.model_export import _write_weights
from lockstep.watch.agent.agent_client import AgentClient, start_agent
from lockstep.watch.agent.service_discovery import Leader, ServiceAddress
from lockstep.watch.procfs import processes

TOKEN = secrets.token_hex(32)


@pytest.fixture
def bystander() -> Iterator["subprocess.Popen[bytes]"]:
    """A process that has nothing to do with any run."""
    process = subprocess.Popen(["sleep", "600"])
    try:
        yield process
    finally:
        process.kill()
        process.wait(10)


def write_address(folder: Path, process: int, **fields: object) -> None:
    """An `agent.json` of an earlier generation that names this process, with its real start time."""
    folder.mkdir(exist_ok=True)
    address: Mapping[str, object] = {
        "run": "planted-1", "generation": 1, "host": "127.0.0.1", "port": 1, "pid": process,
        "start_ticks": processes.start_ticks(process), **fields,
    }  # fmt: skip
    (folder / "agent.json").write_text(json.dumps(address))


def test_a_process_that_the_folder_names_is_not_killed(tmp_path: Path, bystander: "subprocess.Popen[bytes]") -> None:
    write_address(tmp_path / "cluster", bystander.pid)
    LocalCluster(LocalClusterConfig(), new_run_id("attacked"), tmp_path, 2).close()
    assert bystander.poll() is None


@pytest.mark.parametrize("pid", [1, 0, -1, os.getpid(), os.getppid()], ids=["init", "none", "all", "own", "parent"])
def test_neither_the_first_process_nor_a_parent_is_ever_killed(pid: int, tmp_path: Path) -> None:
    write_address(tmp_path, pid)
    kill_previous_agent(tmp_path, 2)
    assert not processes.send_signal(pid, processes.start_ticks(pid), 9)


def test_the_agent_of_another_run_is_not_killed(tmp_path: Path) -> None:
    """Its address is copied to another folder: neither it nor its shared memory is touched."""
    run = new_run_id("other")
    client = AgentClient(start_agent(run, TOKEN, tmp_path / "other"), TOKEN)
    try:
        address = ServiceAddress.read(tmp_path / "other")
        Leader(1, address.host, address.port, None, None, 30.0).publish(run)
        write_address(tmp_path / "mine", address.pid, run=run, host=address.host, port=address.port)
        assert take_over_local_agent(tmp_path / "mine", 2, 5.0) is None
        kill_previous_agent(tmp_path / "mine", 2)
        assert client.list() == [] and client.alive
        assert run_shm_dir(run).is_dir()
        kill_previous_agent(tmp_path / "other", 2)
        assert not processes.is_alive(address.pid, address.start_ticks)
    finally:
        client.shut_down()
        client.close()


def test_a_relative_folder_is_recognised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`lockstep train` with `folder: runs` gives the agent a relative path."""
    monkeypatch.chdir(tmp_path)
    address = start_agent(new_run_id("relative"), TOKEN, Path("cluster"))
    monkeypatch.chdir("/")
    assert address.names_agent(tmp_path / "cluster") and not address.names_agent(tmp_path)
    kill_previous_agent(tmp_path / "cluster", 2)
    assert not processes.is_alive(address.pid, address.start_ticks)


@pytest.mark.parametrize(
    "fields",
    [
        {"pid": "1/../1"}, {"pid": 1.5}, {"start_ticks": None}, {"run": "../../etc"}, {"run": 7}, {"generation": "0"},
        {"host": ["a"]}, {"more": 1},
    ],
    ids=str,
)  # fmt: skip
def test_an_address_of_another_form_is_ignored(fields: Mapping[str, object], tmp_path: Path) -> None:
    write_address(tmp_path, os.getpid(), **fields)
    kill_previous_agent(tmp_path, 2)
    assert take_over_local_agent(tmp_path, 2, 5.0) is None
    with pytest.raises(ValueError):
        ServiceAddress.read(tmp_path)


def test_shared_memory_of_a_living_run_is_not_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder names a dead process, and a run of which processes are alive."""
    monkeypatch.setattr(reattach, "KILL_WAIT_S", 0.5)
    run = new_run_id("living")
    ended = subprocess.Popen(["true"])
    ended.wait(10)
    code = (
        "import sys, time\nfrom lockstep.watch.beacon.writer import open_beacon\n"
        "open_beacon(sys.argv[1], 'w', 'w', 0); print(flush=True); time.sleep(60)"
    )
    worker = subprocess.Popen([sys.executable, "-c", code, run], stdout=subprocess.PIPE)
    try:
        assert worker.stdout is not None and worker.stdout.readline()
        make_run_shm_dir(run)
        write_address(tmp_path, ended.pid, run=run, start_ticks=1)
        kill_previous_agent(tmp_path, 2)
        assert (run_shm_dir(run) / "w.beacon").exists()
    finally:
        worker.kill()
        worker.communicate(timeout=10)
        subprocess.run(["rm", "-rf", str(run_shm_dir(run))], check=True, timeout=10)


PRECIOUS = "do not overwrite\n"


@pytest.fixture
def precious(tmp_path: Path) -> Path:
    """A file outside of the run folder."""
    file = tmp_path / "precious"
    file.write_text(PRECIOUS)
    return file


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """The folder of a run that was interrupted."""
    Ledger.create(tmp_path / "run", {"name": "run", "steps": 3}).close()
    return tmp_path / "run"


WRITTEN = (
    "lock", "metrics.jsonl", "report.html", "summary.json", "run-id", ".report.html.tmp", "ledger.sqlite-wal",
    "ledger.sqlite-journal", "steps/00000001.partial", "logs/controller.log", "logs/policy-0.log",
    "cluster/agent.log", "cluster/.agent.json.1", "checkpoints/00000001.tmp-save/rank-00000.safetensors",
)  # fmt: skip


@pytest.mark.parametrize("name", WRITTEN)
def test_a_run_folder_with_a_link_to_elsewhere_is_refused(name: str, run_folder: Path, precious: Path) -> None:
    link = run_folder / name
    link.parent.mkdir(parents=True, exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to(precious)
    with pytest.raises(PermissionError, match=rf"{name} is a link to {precious}, out of the run folder: remove it"):
        Ledger.resume(run_folder)
    assert precious.read_text() == PRECIOUS


@pytest.mark.parametrize("name", ["steps", "checkpoints", "logs", "cluster", "tensorboard", "incidents"])
def test_a_run_folder_with_a_link_instead_of_a_folder_is_refused(name: str, run_folder: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    shutil.rmtree(run_folder / name, ignore_errors=True)
    (run_folder / name).symlink_to(elsewhere)
    with pytest.raises(PermissionError, match=f"{name} is a link to {elsewhere}, out of the run folder"):
        Ledger.resume(run_folder)
    assert list(elsewhere.iterdir()) == []


def lockstep(*words: str | Path) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "lockstep", *map(str, words)]
    return subprocess.run(command, text=True, capture_output=True, timeout=170)


def test_a_resume_of_such_a_folder_is_refused_before_anything_starts(tmp_path: Path, precious: Path) -> None:
    values = config(task(tmp_path), "sft", steps=1, evaluation=None, trainer={"ranks": 1, "threads": 1})
    Ledger.create(tmp_path / "runs" / "sft", check_config(values, "test").model_dump(mode="json")).close()
    (tmp_path / "runs" / "sft" / "lock").unlink()
    (tmp_path / "runs" / "sft" / "lock").symlink_to(precious)
    done = lockstep("train", "--resume", tmp_path / "runs" / "sft")
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert "lock is a link to" in " ".join(done.stderr.split()), done.stderr
    assert precious.read_text() == PRECIOUS


@pytest.mark.slow
@pytest.mark.parametrize(("access", "folders", "files"), [("private", 0o700, 0o600), ("group", 0o2770, 0o660)])
def test_all_that_a_run_writes_has_the_access_of_its_folder(
    access: str, folders: int, files: int, tmp_path: Path
) -> None:
    values = config(task(tmp_path), "sft", steps=2, folder_access=access, trainer={"ranks": 1, "threads": 1})
    values |= {"checkpoint": {"every": 1}, "report": {"tensorboard": True, "html": True}}
    done = lockstep("train", write(tmp_path, values))
    assert done.returncode == 0, done.stderr
    found = [tmp_path / "runs" / "sft", *(tmp_path / "runs" / "sft").rglob("*")]
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in found}
    assert {"checkpoints", "logs", "cluster", "report.html", "export"} <= {path.name for path in found}
    wrong = {path: oct(mode) for path, mode in modes.items() if mode != (folders if path.is_dir() else files)}
    assert wrong == {}


def test_links_within_the_run_folder_are_allowed(run_folder: Path) -> None:
    """Such as `latest`, which users make."""
    (run_folder / "checkpoints" / "00000001").mkdir()
    (run_folder / "checkpoints" / "latest").symlink_to("00000001")
    (run_folder / "wandb").mkdir()
    (run_folder / "wandb" / "debug.log").symlink_to("/elsewhere")  # made by wandb
    Ledger.resume(run_folder).close()


def test_a_pipe_in_a_run_folder_blocks_nothing(run_folder: Path) -> None:
    os.mkfifo(run_folder / "metrics.jsonl")
    with pytest.raises(PermissionError, match=r"metrics.jsonl is a pipe, not a file"):
        Ledger.resume(run_folder)


RUN_IDS = ("../../../home", "a/b", "-x", "\x1b[2J", "x" * 64, "x" * (1 << 20), "\udcff")


@pytest.mark.parametrize("text", RUN_IDS, ids=lambda text: ascii(text)[:20])
def test_a_run_id_of_another_form_is_ignored(text: str, run_folder: Path) -> None:
    """It names a folder in shared memory, which is removed."""
    (run_folder / "run-id").write_text(text, errors="surrogateescape")
    assert read_run_id(run_folder) == ""
    assert claim_run_id(run_folder, "run") == read_run_id(run_folder) != ""


def test_an_export_does_not_write_through_a_link(tmp_path: Path) -> None:
    """Its temporary folder has a name that can be guessed, in a folder that others may write to."""
    (tmp_path / "precious").mkdir()
    (tmp_path / "out.tmp-export").symlink_to(tmp_path / "precious")
    with pytest.raises(OSError, match=r"out\.tmp-export is a link to"):
        _write_weights(tmp_path / "out.tmp-export", "model.safetensors", {"weight": torch.ones(2)})
    assert list((tmp_path / "precious").iterdir()) == []


@needs_root
def test_root_does_not_write_to_other_names_of_its_files_in_a_folder_of_another_user(precious: Path) -> None:
    with public_folder() as public:
        mine = public / "precious"
        mine.write_text(PRECIOUS)
        Ledger.create(public / "run", {"name": "run", "steps": 3}).close()
        (public / "run" / "lock").unlink()
        os.link(mine, public / "run" / "lock")
        os.chown(public / "run", ATTACKER, ATTACKER)
        with pytest.raises(PermissionError, match="lock has another name elsewhere"):
            Ledger.resume(public / "run")
        assert mine.read_text() == PRECIOUS


def test_links_that_appear_later_are_not_followed(run_folder: Path, precious: Path) -> None:
    """The folder's owner makes them while the run writes."""
    for name in ("metrics.jsonl", ".summary.json.tmp"):
        (run_folder / name).symlink_to(precious)
    with pytest.raises(PermissionError, match=r"metrics.jsonl is a link"):
        open_sinks(run_folder, tensorboard=False)
    with pytest.raises(PermissionError, match=r"summary.json.tmp is a link"):
        replace_file(run_folder / "summary.json", b"{}")
    (run_folder / "summary.json").symlink_to(precious)
    (run_folder / ".summary.json.tmp").unlink(missing_ok=True)
    replace_file(run_folder / "summary.json", b"{}")  # replaces the link
    assert precious.read_text() == PRECIOUS and not (run_folder / "summary.json").is_symlink()


@pytest.mark.parametrize(("mode", "folders", "files"), [(0o700, 0o700, 0o600), (0o2770, 0o2770, 0o660)])
@pytest.mark.parametrize("umask", [0o000, 0o077])
def test_a_run_folder_has_its_mode_whatever_the_umask_is(
    mode: int, folders: int, files: int, umask: int, tmp_path: Path
) -> None:
    before = os.umask(umask)
    try:
        with Ledger.create(tmp_path / "run", {"name": "run", "steps": 3}, mode) as ledger:
            ledger.keep(0, [])
            open_sinks(tmp_path / "run").close()
            start_agent(run := new_run_id("modes"), TOKEN, tmp_path / "run" / "cluster")
            kill_previous_agent(tmp_path / "run" / "cluster", 2)
            assert not run_shm_dir(run).exists()
    finally:
        os.umask(before)
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in [tmp_path / "run", *(tmp_path / "run").rglob("*")]}
    assert len(modes) > 8
    wrong = {path.name: oct(mode) for path, mode in modes.items() if mode != (folders if path.is_dir() else files)}
    assert wrong == {}


def test_a_run_folder_that_exists_keeps_its_mode(run_folder: Path) -> None:
    run_folder.chmod(0o750)
    Ledger.resume(run_folder).close()
    assert stat.S_IMODE(run_folder.stat().st_mode) == 0o750
