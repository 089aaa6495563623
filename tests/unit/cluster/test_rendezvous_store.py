"""The rendezvous store of a run: files on one host, a process with limits across hosts."""

import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from lockstep.base import folders
from lockstep.base.folders import make_run_shm_dir, new_run_id
from lockstep.cluster import rendezvous_store
from lockstep.cluster.rendezvous_store import (
    FileRendezvousStore,
    RendezvousStoreLost,
    RendezvousStoreProcess,
    delete_scope,
    make_rendezvous_store,
    open_store,
    scope_file,
)

BOUND_S = 60.0


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("LOCKSTEP_BEACONS", str(tmp_path / "shm"))
    name = new_run_id("stores")
    make_run_shm_dir(name)
    return name


@pytest.fixture
def process(tmp_path: Path) -> Iterator[RendezvousStoreProcess]:
    made = RendezvousStoreProcess("127.0.0.1", None, tmp_path / "cluster")
    yield made
    made.close()


def until(there: Callable[[], bool]) -> None:
    deadline = time.monotonic() + BOUND_S
    while not there():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def kill(process: RendezvousStoreProcess, noticed: Callable[[], bool]) -> None:
    """Kills the store, and looks for its end as the controller does until `noticed`."""
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)

    def look() -> bool:
        process.check()
        return noticed()

    until(look)


def test_files_are_for_this_user_only_and_scopes_are_separate(run: str) -> None:
    url = FileRendezvousStore(run).serve()
    folder = folders.run_shm_dir(run) / "rendezvous"
    assert url == folder.as_uri() and stat.S_IMODE(folder.stat().st_mode) == 0o700
    one, other = open_store(url, "gen1/policy/0", 5.0), open_store(url, "gen1/policy/1", 5.0)
    one.set("joined/0", "x")
    assert open_store(url, "gen1/policy/0", 5.0).get("joined/0") == b"x"
    assert not other.check(["joined/0"])
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    delete_scope(url, "gen1/policy/0")
    delete_scope(url, "gen1/policy/0")
    assert not scope_file(url, "gen1/policy/0").exists()
    assert not open_store(url, "gen1/policy/0", 5.0).check(["joined/0"])


def test_a_planted_link_is_not_followed(run: str, tmp_path: Path) -> None:
    url = FileRendezvousStore(run).serve()
    (tmp_path / "precious").write_text("kept")
    scope_file(url, "gen1/policy/0").symlink_to(tmp_path / "precious")
    with pytest.raises(RendezvousStoreLost, match="is a link"):
        open_store(url, "gen1/policy/0", 5.0)
    assert (tmp_path / "precious").read_text() == "kept"


def test_a_run_that_has_ended_gets_no_new_folder(run: str) -> None:
    store = FileRendezvousStore(run)
    folders.run_shm_dir(run).rmdir()
    with pytest.raises(RendezvousStoreLost, match="No such file"):
        open_store(store.serve(), "gen1/policy/0", 5.0)
    assert not folders.run_shm_dir(run).exists()


def test_files_are_not_used_across_hosts_or_on_a_network_file_system(
    run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kind(several_hosts: bool) -> type:
        made = make_rendezvous_store(run, tmp_path, "127.0.0.1", None, several_hosts)
        made.close()
        return type(made)

    assert (kind(False), kind(True)) == (FileRendezvousStore, RendezvousStoreProcess)
    monkeypatch.setattr(rendezvous_store, "is_on_local_disk", lambda folder: False)
    assert kind(False) is RendezvousStoreProcess


def test_a_store_that_ends_is_named_and_replaced_at_the_same_address(
    process: RendezvousStoreProcess, caplog: pytest.LogCaptureFixture
) -> None:
    url = process.serve()
    assert process.serve() == url == f"tcp://127.0.0.1:{process.address[1]}"
    first = process.pid
    assert first is not None
    before = open_store(url, "gen1", BOUND_S)
    before.set("a", "1")
    kill(process, lambda: process.pid != first)
    message = r"rendezvous store \(tcp://127.0.0.1:\d+\) failed"
    with pytest.raises(RendezvousStoreLost, match=message), rendezvous_store.store_errors(url):
        before.check(["a"])
    assert f"its process (pid {first}) was ended by signal 9; restarting it" in caplog.text
    again = open_store(url, "gen1", BOUND_S)
    assert process.pid not in (None, first) and not again.check(["a"])


def test_a_store_that_keeps_ending_is_given_up(
    process: RendezvousStoreProcess, caplog: pytest.LogCaptureFixture
) -> None:
    process.serve()
    for _ in range(rendezvous_store.MAX_RESTARTS):
        pid = process.pid
        kill(process, lambda pid=pid: process.pid != pid)  # type: ignore[misc]
    kill(process, lambda: "not restarted" in caplog.text)
    assert "the 6th time, and is not restarted" in caplog.text
    with pytest.raises(RendezvousStoreLost, match="not restarted"):
        process.serve()
    with pytest.raises(RendezvousStoreLost):
        open_store(process.url, "gen1", 1.0)


def test_a_store_on_ipv6(tmp_path: Path) -> None:
    made = RendezvousStoreProcess("::1", None, tmp_path)
    try:
        url = made.serve()
        assert url == f"tcp://[::1]:{made.address[1]}"
        open_store(url, "six", BOUND_S).set("said", "over IPv6")
        assert open_store(url, "six", BOUND_S).get("said") == b"over IPv6"
    finally:
        made.close()


def test_the_process_ends_with_the_controller(tmp_path: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path\n"
        "from lockstep.cluster.rendezvous_store import RendezvousStoreProcess, open_store\n"
        "store = RendezvousStoreProcess('127.0.0.1', None, Path(sys.argv[1]))\n"
        "open_store(store.serve(), 'a', 60.0)\n"
        "print(store.pid, flush=True); time.sleep(300)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE) as controller:
        assert controller.stdout is not None
        pid = int(controller.stdout.readline())
        assert psutil.pid_exists(pid)
        controller.kill()
    until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
