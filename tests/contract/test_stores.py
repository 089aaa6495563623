"""One suite for every store: a shared folder, an S3 server in a process of its own, and memory."""

import multiprocessing
import os
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from store_writer import CONFIG, do_step, follow, rollouts, write_run

import s3_server as s3_servers
from lockstep.base.wait_state import WaitTimeout
from lockstep.ledger import FolderExists, Ledger
from lockstep.ledger.store import mirror as mirrors
from lockstep.ledger.store import object_store
from lockstep.ledger.store.manifest import ContinuedElsewhere, newest_manifest, put_manifest
from lockstep.ledger.store.mirror import StoreIncomplete, StoreMirror, mirrored
from lockstep.ledger.store.object_store import StoreError, open_store
from lockstep.ledger.store.restore import NothingStored, restore_run

pytest.importorskip("s3fs")


@pytest.fixture(params=["file", "s3", "memory"])
def url(request, tmp_path):
    if request.param == "file":
        return f"file://{tmp_path}/shared"
    return request.getfixturevalue("s3_url") if request.param == "s3" else f"memory://{tmp_path.name}"


@pytest.fixture(params=["file", "s3"])
def shared_url(request, tmp_path):
    """Of a store that other processes see."""
    return f"file://{tmp_path}/shared" if request.param == "file" else request.getfixturevalue("s3_url")


def test_objects(url, tmp_path) -> None:
    store = open_store(url)
    assert store.names("manifests") == []
    with pytest.raises(FileNotFoundError):
        store.read("manifests/none")
    store.create("manifests/1.json", b"one")
    with pytest.raises(FileExistsError):
        store.create("manifests/1.json", b"two")
    assert store.read("manifests/1.json") == b"one" and store.names("manifests") == ["1.json"]
    source, moved = tmp_path / "source", []
    source.write_bytes(os.urandom(3_000_000))
    with source.open("rb") as opened:
        source.unlink()  # as a checkpoint that the run deletes meanwhile
        store.upload("files/a/x", Path(f"/proc/self/fd/{opened.fileno()}"), moved.append)
        assert sum(moved) == 3_000_000
        store.download("files/a/x", tmp_path / "copy", moved.append)
        assert (tmp_path / "copy").read_bytes() == opened.read()
    store.delete(["files/a/x", "files/a/none"])
    assert store.names("files/a") == []
    with pytest.raises(FileNotFoundError):
        store.download("files/a/x", tmp_path / "copy", moved.append)


def test_of_many_writers_one_creates_an_object(url) -> None:
    won, begin = [], threading.Barrier(8)
    stores = [open_store(url) for _ in range(8)]

    def write(number: int) -> None:
        begin.wait(60)
        try:
            stores[number].create("manifests/1.json", b"%d" % number)
            won.append(number)
        except FileExistsError:
            pass

    writers = [threading.Thread(target=write, args=(number,)) for number in range(8)]
    for each in writers:
        each.start()
    for each in writers:
        each.join(120)
    assert len(won) == 1 and stores[0].read("manifests/1.json") == b"%d" % won[0]


@pytest.fixture
def begun(url, tmp_path):
    """A run of five steps in its folder, with its mirror."""
    made = StoreMirror(url, "run", "runs")
    made.claim(None)
    with Ledger.create(tmp_path / "here" / "run", CONFIG) as ledger:
        follow(made, ledger.folder)
        for step in range(5):
            do_step(ledger, step)
            assert made.copy_now()
        yield made, ledger


def test_an_empty_machine_gets_the_run(begun, tmp_path) -> None:
    mirror, ledger = begun
    folder = restore_run(mirror.url, tmp_path / "there")
    assert folder == tmp_path / "there" / "run"
    with Ledger.resume(folder) as restored:
        assert restored.collected_steps() == ledger.collected_steps() == list(range(5))
        assert restored.stored_steps() == [2, 3, 4] and restored.can_repeat_after(1)
        assert restored.rollouts(4).groups[0].completions[0].text == rollouts(4).groups[0].completions[0].text
        assert [row.step for row in restored.checkpoints()] == [1, 3]
        for row in restored.checkpoints():
            there = {path.name: path.read_bytes() for path in row.path.iterdir()}
            assert there == {
                path.name: path.read_bytes() for path in (ledger.folder / "checkpoints" / row.path.name).iterdir()
            }
        assert restored.config() == CONFIG and len(restored.metrics_rows()) == 4  # those at the last checkpoint
    store = open_store(mirror.url)
    kept = [name for name in store.names("files/steps") if store.names(f"files/steps/{name}")]
    assert kept == ["00000003.arrow", "00000004.arrow", "00000005.arrow"]
    assert len(store.names("manifests")) == 2
    assert restore_run(mirror.url, tmp_path / "there") == folder  # continues this state: not downloaded again
    (folder / "store.json").unlink()
    with pytest.raises(FolderExists):
        restore_run(mirror.url, tmp_path / "there")


def test_the_first_process_stops_when_another_continues_the_run(begun, tmp_path) -> None:
    mirror, ledger = begun
    folder = restore_run(mirror.url, tmp_path / "there")
    second = StoreMirror(mirror.url.removesuffix("/run"), "run", "runs")
    second.claim(folder)
    do_step(ledger, 5)
    with pytest.raises(ContinuedElsewhere, match="has continued the run since"):
        mirror.copy_now()
    with pytest.raises(ContinuedElsewhere):  # nor does a later start of the first folder
        StoreMirror(second.url.removesuffix("/run"), "run", "runs").claim(ledger.folder)
    with pytest.raises(StoreError, match="already holds a run"):
        StoreMirror(second.url.removesuffix("/run"), "run", "runs").claim(None)


def test_two_machines_that_resume_at_once(begun, tmp_path) -> None:
    mirror, _ = begun
    base = mirror.url.removesuffix("/run")
    folders = [restore_run(mirror.url, tmp_path / name) for name in ("one", "two")]
    claims = [StoreMirror(base, "run", "runs") for _ in folders]
    seen = newest_manifest(claims[0]._store)
    claims[0].claim(folders[0])
    behind = mirrors.next_manifest(seen, "run", "runs", claims[1]._writer)  # it read the state before the other claimed
    with pytest.raises(ContinuedElsewhere):
        put_manifest(claims[1]._store, behind)
    assert newest_manifest(claims[0]._store).writer == claims[0]._writer


def test_a_lost_answer_is_no_conflict(begun) -> None:
    mirror, _ = begun
    put_manifest(mirror._store, newest_manifest(mirror._store))


def test_damage_in_the_store_is_found(begun, tmp_path) -> None:
    mirror, _ = begun
    file = next(each for each in newest_manifest(mirror._store).files if each.path.endswith("rank0.safetensors"))
    (tmp_path / "damaged").write_bytes(b"\0" * file.size)
    mirror._store.upload(file.key, tmp_path / "damaged", lambda count: None)
    with pytest.raises(StoreError, match="differs from its digest"):
        restore_run(mirror.url, tmp_path / "there")
    assert list((tmp_path / "there").iterdir()) == []
    mirror._store.delete([file.key])
    with pytest.raises(StoreError, match=r"files of state .* are missing"):
        restore_run(mirror.url, tmp_path / "there")


@pytest.mark.parametrize("path", ["../up", "/etc/passwd", "steps/../../up", "a//b", ".ssh/x", ""])
def test_a_manifest_cannot_name_files_outside_of_the_folder(tmp_path, path) -> None:
    store = open_store(f"file://{tmp_path}/shared")
    text = (
        '{"run":"run","folder":"runs","sequence":1,"writer":"w","host":"h","at":0,"files":[{"path":"%s","key":'
        '"files/%s/w-0","size":0,"sha256":""}]}'
    )
    store.create("manifests/000000000001.json", (text % (path, path)).encode())
    with pytest.raises(StoreError, match="names a file outside"):
        newest_manifest(store)


def test_no_run(url, tmp_path) -> None:
    with pytest.raises(NothingStored, match="there is no run"):
        restore_run(f"{url}/none", tmp_path)
    mirror = StoreMirror(url, "none", "runs")
    mirror.claim(None)
    with pytest.raises(NothingStored, match="nothing to resume from"):
        restore_run(f"{url}/none", tmp_path)
    StoreMirror(url, "none", "runs").claim(None)  # the name is free as long as nothing is stored


FORKS = multiprocessing.get_context("forkserver")


def run_writer(url: str, folder: Path, *kill: int | bool) -> tuple[int, list[int]]:
    """Writes four steps in a process of its own. Returns its exit code and its log."""
    log = folder.parent.with_name(f"{folder.parent.name}.log")
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text("")
    env = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    FORKS.set_forkserver_preload(["torch", "store_writer"])  # the server is also that of later tests, with ranks
    process = FORKS.Process(target=write_run, args=(url, folder, 4, log, env, *kill))
    process.start()
    process.join(120)
    return process.exitcode, [int(line) for line in log.read_text().split()]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_process_that_is_killed_at_any_call(shared_url, tmp_path, when) -> None:
    """Whatever call the kill comes at: another machine gets the last complete state or a later one, and the same
    folder continues."""
    code, lines = run_writer(f"{shared_url}/whole", tmp_path / "whole" / "run")
    assert code == 0
    for number in range(1 if when == "before" else 2, lines[-1], 1 if shared_url.startswith("file") else 3):
        url, here = f"{shared_url}/{when}-{number}", tmp_path / str(number) / "run"
        code, lines = run_writer(url, here, number, when == "after")
        assert code == -signal.SIGKILL
        complete = lines[-1] if lines else 0
        try:
            there = restore_run(f"{url}/run", tmp_path / str(number) / "there")
        except NothingStored:
            assert complete == 0
        else:
            with Ledger.resume(there) as ledger:
                assert len(ledger.collected_steps()) >= complete
                for step in ledger.stored_steps():
                    assert ledger.rollouts(step).groups[0].prompt.uid == f"0:{step}"
            shutil.rmtree(there)
        assert run_writer(url, here)[0] == 0
        assert len(open_store(f"{url}/run").names("manifests")) == 2
        with Ledger.resume(restore_run(f"{url}/run", tmp_path / str(number) / "there")) as ledger:
            assert ledger.collected_steps() == [0, 1, 2, 3] and [row.step for row in ledger.checkpoints()] == [1, 3]


@pytest.fixture
def quick(monkeypatch):
    """Short pauses."""
    monkeypatch.setattr(mirrors, "LOOK_EVERY_S", 0.05)
    monkeypatch.setattr(mirrors, "FIRST_PAUSE_S", 0.05)
    monkeypatch.setattr(mirrors, "LONGEST_PAUSE_S", 0.2)


@pytest.mark.timeout(600)
def test_a_server_that_hangs_does_not_stop_the_run(s3_server, s3_url, tmp_path, quick, monkeypatch) -> None:
    lines: list[str] = []
    mirror = StoreMirror(s3_url, "run", "runs", finish_s=60)
    mirror.claim(None)
    with Ledger.create(tmp_path / "run", CONFIG) as ledger, mirrored(mirror, ledger, (), lines.append):
        do_step(ledger, 0)
        while mirror._done is None:  # a call that the hang would interrupt has a bound of two minutes
            time.sleep(0.02)
        copied = mirror._done
        monkeypatch.setattr(object_store, "STALL_S", 1.0)
        s3_server.signal(signal.SIGSTOP)
        try:
            for step in range(1, 4):
                do_step(ledger, step)
            assert mirror._done is copied  # the steps waited for no answer: there was none
            while not lines:
                time.sleep(0.05)
            assert "no answer for" in lines[0] and "training continues" in lines[0] and s3_url in lines[0]
            assert mirror._done is copied and ledger.collected_steps() == [0, 1, 2, 3]
        finally:
            monkeypatch.setattr(object_store, "STALL_S", 120.0)
            s3_server.signal(signal.SIGCONT)
    assert any("works again" in line for line in lines)
    assert s3_servers.KEYS["AWS_SECRET_ACCESS_KEY"] not in "".join(lines)
    with Ledger.resume(restore_run(mirror.url, tmp_path / "there")) as restored:
        assert restored.collected_steps() == [0, 1, 2, 3]


@pytest.mark.parametrize("when", ["before the index is copied", "after it"])
@pytest.mark.parametrize("done, more", [(4, 1), (4, 2), (5, 1), (5, 4)])
def test_what_a_run_does_while_its_files_are_opened_is_no_failure(tmp_path, monkeypatch, when, done, more) -> None:
    mirror = StoreMirror(f"file://{tmp_path}/shared", "run", "runs")
    copy = Ledger.copy_index

    def copied(reader: Ledger, *arguments: Any) -> None:
        monkeypatch.setattr(Ledger, "copy_index", copy)
        if when == "after it":
            reader.copy_index(*arguments)
        for step in range(done, done + more):
            do_step(ledger, step)  # deletes the files of old steps and checkpoints
        if when != "after it":
            reader.copy_index(*arguments)

    with Ledger.create(tmp_path / "run", CONFIG) as ledger:
        mirror.claim(None)
        follow(mirror, ledger.folder)
        for step in range(done):
            do_step(ledger, step)
        monkeypatch.setattr(Ledger, "copy_index", copied)
        assert mirror.copy_now()
    with Ledger.resume(restore_run(mirror.url, tmp_path / "there")) as restored:
        assert len(restored.collected_steps()) >= done
        assert all(list(row.path.iterdir()) for row in restored.checkpoints()[-2:])


def test_the_end_of_a_run_says_what_the_store_lacks(tmp_path, quick) -> None:
    lines: list[str] = []
    shared = tmp_path / "shared"
    mirror = StoreMirror(f"file://{shared}", "run", "runs", finish_s=1.0)
    mirror.claim(None)

    def whole_run() -> None:
        with Ledger.create(tmp_path / "run", CONFIG) as ledger, mirrored(mirror, ledger, (), lines.append):
            shutil.rmtree(shared)
            shared.write_text("no folder any more")
            do_step(ledger, 0)

    with pytest.raises(StoreIncomplete, match=r"lacks .* which are complete in .*--resume") as error:
        whole_run()
    assert isinstance(error.value.__cause__, WaitTimeout) and "NotADirectory" in error.value.problem
    mirror._thread.join(60)  # its process would have ended
    shared.unlink()
    again = StoreMirror(f"file://{shared}", "run", "runs")
    again.claim(tmp_path / "run")
    with Ledger.resume(tmp_path / "run") as ledger, mirrored(again, ledger, (), lines.append):
        pass
    with Ledger.resume(restore_run(again.url, tmp_path / "there")) as restored:
        assert restored.collected_steps() == [0]


def test_a_run_that_is_continued_elsewhere_stops(tmp_path, quick) -> None:
    lines: list[str] = []
    base = f"file://{tmp_path}/shared"
    mirror = StoreMirror(base, "run", "runs")
    mirror.claim(None)

    def whole_run() -> None:
        with Ledger.create(tmp_path / "run", CONFIG) as ledger, mirrored(mirror, ledger, (), lines.append):
            do_step(ledger, 0)
            while not any(name.startswith("steps") for name in mirror._store.names("files")):
                time.sleep(0.02)
            time.sleep(0.3)
            StoreMirror(base, "run", "runs").claim(restore_run(mirror.url, tmp_path / "there"))
            for step in range(1, 200):
                do_step(ledger, step)
                time.sleep(0.05)

    from lockstep.ledger import StaleGeneration

    with pytest.raises(StaleGeneration):
        whole_run()
    assert any("has continued the run since" in line and "This run stops" in line for line in lines)


def test_refusals(tmp_path, s3_url, monkeypatch) -> None:
    with pytest.raises(StoreError, match="is not supported"):
        open_store("ftp://host/folder")
    with pytest.raises(StoreError, match="absolute"):
        open_store("file://folder")
    monkeypatch.setattr(object_store, "STALL_S", 20.0)
    with pytest.raises(StoreError, match="bucket") as error:
        StoreMirror("s3://there-is-no-such-bucket-here/x", "run", "runs").claim(None)
    assert s3_servers.KEYS["AWS_SECRET_ACCESS_KEY"] not in str(error.value)
