"""What a store may do wrong, and what a run's folder may have in it: nothing is lost or waited for in silence."""

import os
import threading
import time
from pathlib import Path

import pytest
from store_writer import CONFIG, do_step, follow

from lockstep.config.fault_tolerance import StoreConfig
from lockstep.ledger import Ledger, RunIsActive
from lockstep.ledger.store import mirror as mirrors
from lockstep.ledger.store import object_store
from lockstep.ledger.store.manifest import ContinuedElsewhere, newest_manifest
from lockstep.ledger.store.mirror import StoreIncomplete, StoreMirror, claim_store, has_all, mirrored
from lockstep.ledger.store.object_store import ObjectStore, StoreError
from lockstep.ledger.store.restore import read_state, restore_run


class FailingCreate:
    """A store that fails when an object is created, before or after it has done so."""

    def __init__(self, inner: ObjectStore, done: bool) -> None:
        self.inner, self.url, self.done = inner, inner.url, done

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def create(self, key: str, data: bytes) -> None:
        if self.done:
            self.inner.create(key, data)
        raise StoreError(self.url, "AccessDenied")


@pytest.fixture
def mirror(tmp_path, monkeypatch) -> StoreMirror:
    for name, seconds in (("LOOK_EVERY_S", 0.05), ("FIRST_PAUSE_S", 0.05), ("LONGEST_PAUSE_S", 0.2)):
        monkeypatch.setattr(mirrors, name, seconds)
    made = StoreMirror(f"file://{tmp_path}/shared", "run", "runs", finish_s=3.0)
    made.claim(None)
    return made


@pytest.fixture
def ledger(mirror, tmp_path):
    """Of a run that the test copies itself."""
    with Ledger.create(tmp_path / "run", CONFIG) as ledger:
        follow(mirror, ledger.folder)
        do_step(ledger, 0)
        mirror.copy_now()
        yield ledger


def test_a_step_after_a_lost_answer_is_copied(mirror, ledger, tmp_path) -> None:
    store, mirror._store = mirror._store, FailingCreate(mirror._store, done=True)
    do_step(ledger, 1)
    with pytest.raises(StoreError):
        mirror.copy_now()
    mirror._store = store
    do_step(ledger, 2)
    assert mirror.copy_now()
    assert len(store.names("manifests")) == 2
    with Ledger.resume(restore_run(mirror.url, tmp_path / "there")) as restored:
        assert restored.collected_steps() == [0, 1, 2]


def test_what_every_try_uploads_again_is_no_progress(mirror, tmp_path) -> None:
    mirror._store = FailingCreate(mirror._store, done=False)
    began = time.monotonic()

    def whole_run() -> None:
        with Ledger.create(tmp_path / "run", CONFIG) as ledger, mirrored(mirror, ledger, (), lambda line: None):
            do_step(ledger, 0)

    with pytest.raises(StoreIncomplete, match="AccessDenied"):
        whole_run()
    assert time.monotonic() - began < 20
    assert not read_state(tmp_path / "run").complete


def test_exports_of_any_name_and_place(mirror, tmp_path) -> None:
    """Only what is in the run's folder, also by links, is copied; of the rest the user hears."""
    lines: list[str] = []
    for name in ("out", "run/my model é"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "secret").write_text("SECRET")
    (tmp_path / "run").rmdir()
    with Ledger.create(tmp_path / "run", CONFIG) as ledger:
        with mirrored(mirror, ledger, ("../out", "my model é"), lines.append):
            (ledger.folder / "my model é").mkdir()
            (ledger.folder / "my model é" / "a b.txt").write_text("model")
            (ledger.folder / "my model é" / "a\udcffb").write_text("no UTF-8")
            (ledger.folder / "inputs").mkdir()
            (ledger.folder / "inputs" / "link").symlink_to(tmp_path / "out" / "secret")
            do_step(ledger, 0)
        assert read_state(ledger.folder).complete
    assert len(lines) == 3 and all("is not copied" in line for line in lines)
    shared = [path for path in (tmp_path / "shared").rglob("*") if path.is_file()]
    assert not any(b"SECRET" in path.read_bytes() for path in shared)
    there = restore_run(mirror.url, tmp_path / "there")
    assert (there / "my model é" / "a b.txt").read_text() == "model"


def test_whether_the_store_of_an_ended_run_has_all_of_it(mirror, tmp_path) -> None:
    """The folder knows, and so does one that another machine restored."""
    store, other = StoreConfig(url=f"file://{tmp_path}/shared/"), StoreConfig(url=f"file://{tmp_path}/other")
    with Ledger.create(tmp_path / "run", CONFIG) as ledger, mirrored(mirror, ledger, (), lambda line: None):
        do_step(ledger, 0)
        mirror.copy_now()
        assert not has_all(store, "run", restore_run(mirror.url, tmp_path / "early"))
        (ledger.folder / "summary.json").write_text("{}")
        assert not has_all(store, "run", ledger.folder)
    for folder in (tmp_path / "run", restore_run(mirror.url, tmp_path / "there")):
        assert has_all(store, "run", folder) and has_all(None, "run", folder)
        assert not has_all(other, "run", folder)


def test_a_second_start_does_not_stop_the_run(mirror, ledger, tmp_path) -> None:
    with pytest.raises(RunIsActive):
        claim_store(StoreConfig(url=f"file://{tmp_path}/shared"), "run", "runs", ledger.folder)
    do_step(ledger, 1)
    assert mirror.copy_now()


def test_two_new_runs_of_one_name_lose_nothing(tmp_path) -> None:
    """The second starts before the first has stored anything: the first is refused later, and can go elsewhere."""
    base, lines = f"file://{tmp_path}/shared", list[str]()
    runs = {name: StoreMirror(base, "run", "runs", lines.append) for name in ("one", "two")}
    for mirror in runs.values():
        mirror.claim(None)
    assert len(lines) == 1 and "began a run of this name" in lines[0] and "it will stop" in lines[0]
    for name, mirror in runs.items():
        with Ledger.create(tmp_path / name / "run", CONFIG) as ledger:
            follow(mirror, ledger.folder)
            for step in range(3 if name == "one" else 2):
                do_step(ledger, step)
            if name == "one":
                with pytest.raises(ContinuedElsewhere, match="has continued the run since"):
                    mirror.copy_now()
            else:
                assert mirror.copy_now()
    with Ledger.reader(restore_run(f"{base}/run", tmp_path / "there")) as ledger:
        assert ledger.collected_steps() == [0, 1]
    with pytest.raises(ContinuedElsewhere):
        StoreMirror(base, "run", "runs").claim(tmp_path / "one" / "run")
    other = StoreMirror(f"file://{tmp_path}/other", "run", "runs")
    other.claim(tmp_path / "one" / "run")
    other._folder = tmp_path / "one" / "run"
    assert other.copy_now()
    with Ledger.resume(restore_run(other.url, tmp_path / "elsewhere")) as ledger:
        assert ledger.collected_steps() == [0, 1, 2]


def test_a_disk_that_hangs(mirror, ledger, tmp_path, monkeypatch) -> None:
    key = newest_manifest(mirror._store).files[0].key
    (tmp_path / "shared" / "run" / key).unlink()
    os.mkfifo(tmp_path / "shared" / "run" / key)  # to open it waits without end
    monkeypatch.setattr(object_store, "STALL_S", 1.0)
    with pytest.raises(StoreError, match="no answer for"):
        restore_run(mirror.url, tmp_path / "there")
    go_on = threading.Event()
    monkeypatch.setattr(object_store, "_sync", lambda file: go_on.wait(60))
    with pytest.raises(StoreError, match="no answer for"):
        StoreMirror(f"file://{tmp_path}/shared", "other", "runs").claim(None)
    go_on.set()


def test_another_spelling_of_the_address(mirror, ledger, tmp_path) -> None:
    folder = restore_run(f"file://{tmp_path}//shared/../shared/run/", tmp_path / "there")
    StoreMirror(f"file://{tmp_path}/shared", "run", "runs").claim(folder)


def test_the_name_in_a_manifest_is_that_of_the_address(mirror, ledger, tmp_path) -> None:
    newest = newest_manifest(mirror._store)
    path = Path(f"{tmp_path}/shared/run/manifests/{newest.sequence:012d}.json")
    path.write_bytes(path.read_bytes().replace(b'"run":"run"', b'"run":"../up"'))
    with pytest.raises(StoreError, match="another name"):
        restore_run(mirror.url, tmp_path / "there")
    assert not (tmp_path / "up").exists()
