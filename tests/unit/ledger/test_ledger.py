import contextlib
import json
import multiprocessing
import os
import sqlite3
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import msgspec
import numpy as np
import pytest
import yaml
from ledger_helpers import CONFIG, assert_same, make_completion, make_rollouts

from lockstep.data.samples import Episode, Group, PlacedImage, Prompt, Rollouts
from lockstep.ledger import (
    CompletionSample,
    ConfigChanged,
    FolderExists,
    Ledger,
    NotARun,
    OutOfOrder,
    PromptUsedTwice,
    RunIsActive,
    StaleGeneration,
    StepCollected,
    StepConflict,
    StepCorrupt,
    step_file,
)
from lockstep.ledger.errors import LedgerReadOnly
from lockstep.ledger.sqlite_index import LedgerIndex
from lockstep.ledger.step_samples import choose_samples, image_digests


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_new_run(ledger, folder):
    assert ledger.generation == 1
    assert ledger.config() == CONFIG
    assert yaml.safe_load((folder / "config.yaml").read_text()) == CONFIG
    assert {path.name for path in folder.iterdir() if path.is_dir()} == {"steps", "checkpoints", "logs"}
    assert ledger.last_committed_step() == -1 and ledger.published_version() == -1
    assert ledger.newest_checkpoint() is None and ledger.rollouts(0) is None
    assert [path.name for path in folder.parent.iterdir()] == ["sort"]


def test_a_folder_that_exists_is_not_touched(ledger, folder):
    ledger.record_rollouts(0, make_rollouts(0))
    before = tree(folder)
    with pytest.raises(FolderExists, match=r"already holds a run: resume it \(--resume .*sort\), choose another name"):
        Ledger.create(folder, CONFIG)
    assert tree(folder) == before
    empty = folder.parent / "empty"
    empty.mkdir()
    with pytest.raises(FolderExists, match="already exists: choose another name"):
        Ledger.create(empty, CONFIG)
    assert list(empty.iterdir()) == []


def test_a_config_that_cannot_be_written_leaves_no_folder(folder):
    with pytest.raises(TypeError, match=r"config\.model is a builtins\.object"):
        Ledger.create(folder, {"model": object()})
    assert list(folder.parent.iterdir()) == []


def test_folders_that_are_not_runs(folder, tmp_path):
    Ledger.create(folder, CONFIG).close()
    with pytest.raises(NotARun, match="there is no such folder; runs in the same folder: sort"):
        Ledger.resume(folder.parent / "sorr")
    with pytest.raises(NotARun, match=r"it has no ledger\.sqlite"):
        Ledger.reader(tmp_path)
    (folder / "ledger.sqlite").write_bytes(b"nothing of the kind" * 100)
    with pytest.raises(NotARun, match="not a ledger"):
        Ledger.reader(folder)


def test_rollouts_survive_exactly(ledger, folder):
    given = make_rollouts(0)
    ledger.record_rollouts(0, given, {"packing_seed": 5, "position": [0, 3]})
    ledger.close()
    with Ledger.resume(folder) as again:
        assert again.generation == 2
        stored = again.stored_step(0)
        assert_same(stored.rollouts, given)
        assert stored.extra == {"packing_seed": 5, "position": [0, 3]}
        assert again.collected_steps() == [0]
        assert again.prompts_used() == {"0:0": 0, "0:1": 0, "0:2": 0}


def test_the_same_rollouts_can_be_collected_again(ledger):
    ledger.record_rollouts(0, make_rollouts(0))
    before = ledger.step_path(0).stat()
    ledger.record_rollouts(0, make_rollouts(0))
    assert ledger.step_path(0).stat().st_mtime_ns == before.st_mtime_ns
    other = make_rollouts(0)
    other.groups[0].rewards[0] += 1
    with pytest.raises(StepConflict, match="train on the stored ones"):
        ledger.record_rollouts(0, other)
    assert_same(ledger.rollouts(0), make_rollouts(0))
    assert len(list(ledger.step_path(0).parent.iterdir())) == 1


@pytest.mark.parametrize("committed", [True, False])
def test_interrupted_around_the_commit(ledger, monkeypatch, committed):
    """Either both the row and the file exist, or neither."""
    original = LedgerIndex.transaction

    @contextlib.contextmanager
    def interrupted(self):
        with original(self) as transaction:
            yield transaction
            if not committed:
                raise KeyboardInterrupt
        raise KeyboardInterrupt

    monkeypatch.setattr(LedgerIndex, "transaction", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ledger.record_rollouts(0, make_rollouts(0))
    monkeypatch.undo()
    assert ledger.collected_steps() == ([0] if committed else [])
    assert ledger.step_path(0).exists() == committed
    ledger.record_rollouts(0, make_rollouts(0))
    assert_same(ledger.rollouts(0), make_rollouts(0))


def test_a_prompt_is_used_once(ledger):
    ledger.record_rollouts(0, make_rollouts(0))
    again = make_rollouts(1)
    again.groups[2].prompt.uid = "0:1"
    with pytest.raises(PromptUsedTwice, match="'0:1' of step 2 was already used by step 1"):
        ledger.record_rollouts(1, again)
    assert ledger.collected_steps() == [0] and not ledger.step_path(1).exists()
    ledger.record_rollouts(1, make_rollouts(1))


@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_a_damaged_step_file_is_reported_and_repaired(ledger, damage):
    ledger.record_rollouts(0, make_rollouts(0))
    path = ledger.step_path(0)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    if damage == "remove":
        path.unlink()
    else:
        path.write_bytes(data if damage == "flip" else data[:100])
    with pytest.raises(StepCorrupt, match=r"rewind\(0\)"):
        ledger.rollouts(0)
    ledger.record_checkpoint(0, ledger.folder / "checkpoints" / "0")
    with pytest.raises(StepCorrupt, match="not needed to resume: the checkpoint after step 1 is later"):
        ledger.rollouts(0)
    ledger.record_rollouts(0, make_rollouts(0))
    assert_same(ledger.rollouts(0), make_rollouts(0))


def test_partial_results(ledger, folder):
    ones = [make_completion(f"r{index}", index, index) for index in range(5)]
    ledger.keep(0, ones[:2])
    ledger.keep(0, [])
    ledger.keep(0, ones[2:])
    assert_same(ledger.kept_completions(0), ones)
    assert ledger.kept_completions(1) == []
    longer = make_completion("r1", 9, 77)
    ledger.keep(0, [longer])
    assert_same(ledger.kept_completions(0), [ones[0], longer, *ones[2:]])  # of one request the latest
    ledger.close()
    with Ledger.resume(folder) as again:
        again.keep(0, [make_completion("r9")])
        assert [one.request for one in again.kept_completions(0)] == ["r0", "r1", "r2", "r3", "r4", "r9"]
        again.record_rollouts(0, make_rollouts(0))
        assert again.kept_completions(0) == [] and not list((folder / "steps").glob("*.partial"))
        with pytest.raises(StepCollected, match="step 1: its rollouts are stored already"):
            again.keep(0, ones)


def test_conversations_are_kept_with_mask_and_messages(ledger):
    one = make_completion("r0")
    one.mask = np.array([True, False, False, True])
    one.episode = Episode([{"role": "tool", "content": "4"}], [0.5, 1.0], "answer", {"calls": 1.0})
    plain = make_completion("r1")
    ledger.keep(0, [one, plain])
    assert_same(ledger.kept_completions(0), [one, plain])


def test_images_of_answers_are_kept_with_partial_results_and_steps(ledger, folder):
    one, plain = make_completion("r0", 6), make_completion("r1")
    one.mask = np.array([True, False, False, False, False, True])
    one.images = [
        PlacedImage("ab12" * 8, np.array([1, 3], np.int32), "/run/a.observed", (30, 20), (28, 28)),
        PlacedImage("cd34" * 8, np.array([4], np.int32)),
    ]
    ledger.keep(0, [one, plain])
    assert_same(ledger.kept_completions(0), [one, plain])
    rollouts = Rollouts(0, 0, [Group(Prompt("0:0", 0, np.array([1], np.int32), "a"), [one, plain])])
    ledger.record_rollouts(0, rollouts)
    assert_same(ledger.rollouts(0).groups, rollouts.groups)
    assert image_digests(ledger) == {"ab12" * 8, "cd34" * 8}
    (sample,) = choose_samples(rollouts.groups, 1)
    assert [image["digest"] for image in sample.images] == ["ab12" * 8, "cd34" * 8]
    ledger.step_path(0).write_bytes(b"damaged")
    with pytest.raises(StepCorrupt):  # and not an empty set, by which the images would be deleted
        image_digests(ledger)


def test_partial_records_of_earlier_versions_without_conversations_are_read(ledger, folder):
    """Records are arrays; those of earlier versions end after the text."""
    one = make_completion("r0")
    ledger.keep(0, [one])
    path = folder / "steps" / "00000001.partial"
    record = msgspec.msgpack.decode(path.read_bytes()[12:])
    assert record[6:] == [None, None, None]
    payload = msgspec.msgpack.encode(record[:6])
    path.write_bytes(struct.pack("<4sII", b"LKP1", len(payload), zlib.crc32(payload)) + payload)
    assert_same(ledger.kept_completions(0), [one])


def test_a_torn_tail_of_partial_results_is_dropped_at_every_length(ledger, folder):
    ones = [make_completion(f"r{index}", 3, index) for index in range(3)]
    ends = []
    path = folder / "steps" / "00000001.partial"
    for one in ones:
        ledger.keep(0, [one])
        ends.append(path.stat().st_size)
    ledger.close()
    data = path.read_bytes()
    for length in range(len(data)):
        path.write_bytes(data[:length])
        with Ledger.reader(folder) as reader:
            assert_same(reader.kept_completions(0), ones[: sum(end <= length for end in ends)])
    path.write_bytes(data[: ends[1] + 7] + b"\0" * 40)  # as after a power cut
    with Ledger.resume(folder) as again:
        again.keep(0, [ones[2]])
        assert_same(again.kept_completions(0), ones)


def test_commits_and_publishes_in_order(ledger):
    ledger.commit(0, {"loss": 0.5})
    with pytest.raises(OutOfOrder, match="commit of step 3 is out of order: at most 2"):
        ledger.commit(2, {})
    with pytest.raises(OutOfOrder, match="publish of version 2"):
        ledger.record_published(2)
    ledger.record_published(1)
    ledger.commit(1, {"loss": np.float32(0.25)})
    ledger.commit(0, {"loss": 0.75})  # trained again after a restart
    assert ledger.last_committed_step() == 1 and ledger.published_version() == 1
    assert [(row.step, row.stats) for row in ledger.commits()] == [(0, {"loss": 0.75}), (1, {"loss": 0.25})]


def test_checkpoints_and_retention(ledger, folder):
    for step in range(6):
        ledger.record_rollouts(step, make_rollouts(step, groups=1, size=1))
        ledger.commit(step, {})
    ledger.record_checkpoint(-1, folder / "checkpoints" / "initial")
    assert ledger.delete_unneeded_steps() == []  # one checkpoint alone may turn out to be unreadable
    ledger.record_checkpoint(2, folder / "checkpoints" / "2", metric=0.5)
    assert ledger.delete_unneeded_steps() == []
    ledger.record_checkpoint(4, Path("/elsewhere/4"))
    assert ledger.delete_unneeded_steps() == [0, 1, 2]
    assert sorted(path.stem for path in (folder / "steps").iterdir()) == ["00000004", "00000005", "00000006"]
    assert ledger.rollouts(1) is None and ledger.rollouts(3) is not None
    assert ledger.collected_steps() == list(range(6))
    ledger.record_rollouts(1, make_rollouts(1, groups=1, size=1))  # let go of: stays so
    assert ledger.rollouts(1) is None
    rows = ledger.checkpoints()
    assert [(row.step, row.path, row.metric) for row in rows] == [
        (-1, folder / "checkpoints" / "initial", None),
        (2, folder / "checkpoints" / "2", 0.5),
        (4, Path("/elsewhere/4"), None),
    ]
    ledger.forget_checkpoint(4)
    assert ledger.newest_checkpoint().step == 2


def test_a_moved_run_finds_its_checkpoints(ledger, folder):
    ledger.record_checkpoint(0, folder / "checkpoints" / "0")
    ledger.close()
    moved = folder.parent.parent / "archive"
    folder.rename(moved)
    with Ledger.resume(moved) as again:
        assert again.newest_checkpoint().path == moved / "checkpoints" / "0"


def test_evaluations_metrics_events(ledger):
    sample = CompletionSample("sort 2 1", "1 2", "1 2", 1.0, {"exact_match": 1.0}, "0:1", "stop")
    ledger.record_evaluation(-1, {"eval/exact_match": np.float64(0.25)}, [sample])
    ledger.record_evaluation(5, {"eval/exact_match": 0.75})
    first, second = ledger.evaluations()
    assert (first.step, first.metrics, first.samples) == (-1, {"eval/exact_match": 0.25}, [sample])
    assert second.samples == []
    ledger.record_metrics(0, {"reward/mean": 0.5, "policy/loss": np.float32(2)})
    ledger.record_metrics(0, {"reward/mean": 0.75})
    ledger.record_metrics(1, {"reward/mean": float("nan")})
    assert ledger.metrics_rows()[0].values == {"reward/mean": 0.75, "policy/loss": 2.0}
    assert [row.step for row in ledger.metrics_rows(after=0)] == [1]
    ledger.record_event("restarted", role="engine", rank=1)
    (event,) = ledger.events()
    assert (event.kind, event.fields, event.generation) == ("restarted", {"role": "engine", "rank": 1}, 1)


def test_rewind(ledger, folder):
    for step in range(4):
        ledger.record_rollouts(step, make_rollouts(step))
        ledger.commit(step, {})
        ledger.record_metrics(step, {"x": step})
        ledger.record_published(step + 1)
    ledger.keep(4, [make_completion("r")])
    ledger.record_checkpoint(1, folder / "a")
    ledger.record_checkpoint(3, folder / "b")
    ledger.rewind(2)
    assert ledger.last_committed_step() == 1 and ledger.collected_steps() == [0, 1] and ledger.published_version() == 2
    assert ledger.newest_checkpoint().step == 1 and len(ledger.metrics_rows()) == 2
    assert sorted(path.name for path in (folder / "steps").iterdir()) == ["00000001.arrow", "00000002.arrow"]
    ledger.record_rollouts(2, make_rollouts(2, size=2))  # generated anew, with other content


@pytest.mark.parametrize("interrupted", ["unlink", "fsync_folder"])
def test_an_interrupted_rewind_is_finished_when_the_run_is_resumed(ledger, folder, monkeypatch, interrupted):
    for step in range(3):
        ledger.record_rollouts(step, make_rollouts(step))
    ledger.keep(3, [make_completion("r")])

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "unlink", interrupt) if interrupted == "unlink" else patch.setattr(
            "lockstep.ledger.run_folder.fsync_folder", interrupt
        )
        ledger.rewind(1)
    ledger.close()
    with Ledger.resume(folder) as again:
        assert again.collected_steps() == [0] and again.rollouts(0) is not None and again.rollouts(1) is None
        assert [path.name for path in (folder / "steps").iterdir()] == ["00000001.arrow"]
        again.record_rollouts(1, make_rollouts(1, size=2))  # other content
    with Ledger.resume(folder) as again:
        assert again.collected_steps() == [0, 1], "the rewind is over"


def test_one_process_per_run(ledger, folder):
    code = "import sys; from pathlib import Path; from lockstep.ledger import Ledger; Ledger.resume(Path(sys.argv[1]))"
    other = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, timeout=60)
    assert other.returncode == 1 and f"RunIsActive: {folder} is being run by process {os.getpid()}" in other.stderr
    with pytest.raises(RunIsActive) as caught:
        Ledger.resume(folder)
    assert caught.value.pid == os.getpid()
    ledger.record_event("still mine")


def test_a_stale_generation_writes_nothing(ledger, folder):
    ledger.record_rollouts(0, make_rollouts(0))
    ledger.keep(1, [make_completion("mine")])
    with Ledger.resume(folder, takeover=True) as newer:
        newer.keep(1, [make_completion("theirs")])
        before = tree(folder)
        writes = [
            lambda: ledger.keep(1, [make_completion("late")]),
            lambda: ledger.record_rollouts(1, make_rollouts(1)),
            lambda: ledger.commit(0, {}),
            lambda: ledger.record_published(1),
            lambda: ledger.record_checkpoint(0, folder / "x"),
            lambda: ledger.forget_checkpoint(0),
            lambda: ledger.rewind(0),
            lambda: ledger.record_evaluation(0, {}),
            lambda: ledger.record_metrics(0, {}),
            lambda: ledger.record_event("late"),
        ]
        for write in writes:
            with pytest.raises(
                StaleGeneration, match=r"generation 1 may not write .* generation 2 has taken over the run"
            ):
                write()
        after = tree(folder)
        assert {name for name in before if before[name] != after.get(name)} <= {"ledger.sqlite-shm"}
        assert [one.request for one in newer.kept_completions(1)] == ["mine", "theirs"]


def _read_along(folder: str, results) -> None:
    """Reads repeatedly while the writer works. Every result must be consistent."""
    seen, looks = -1, 0
    with Ledger.reader(Path(folder)) as reader:
        while seen < 39:
            committed, collected = reader.last_committed_step(), reader.collected_steps()
            assert committed >= seen and collected == list(range(len(collected))) and len(collected) > committed
            seen, looks = committed, looks + 1
            if committed >= 0:
                assert reader.rollouts(committed).step == committed
            reader.kept_completions(committed + 1)
            reader.metrics_rows()
    results.put(looks)


@pytest.mark.parametrize("journal", ["WAL", "TRUNCATE"])
def test_a_reader_during_writes(folder, journal, monkeypatch):
    monkeypatch.setattr("lockstep.ledger.sqlite_index.journal_mode_for", lambda _: journal)
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    with Ledger.create(folder, CONFIG) as ledger:
        assert sqlite3.connect(folder / "ledger.sqlite").execute("PRAGMA journal_mode").fetchone() == (
            ("wal",) if journal == "WAL" else ("delete",)
        )
        process = context.Process(target=_read_along, args=(str(folder), results), daemon=True)
        process.start()
        for step in range(40):
            ledger.keep(step, [make_completion("r")])
            ledger.record_rollouts(step, make_rollouts(step, groups=1))
            ledger.record_metrics(step, {"x": step})
            ledger.commit(step, {})
        process.join(timeout=60)
        assert process.exitcode == 0 and results.get(timeout=5) > 0


_KILLED_IN_A_WRITE = """
import os, signal, sqlite3, sys
index = sqlite3.connect(sys.argv[1], isolation_level=None)
index.execute("PRAGMA journal_mode = TRUNCATE")  # as on a network file system, and while a run is made
index.execute("PRAGMA cache_size = 1")  # so that pages are written before the end of the transaction
index.execute("BEGIN IMMEDIATE")
index.execute("UPDATE meta SET value = '7' WHERE key = 'generation'")
for number in range(200):
    index.execute("INSERT INTO events VALUES (?, 'half', ?, 1, 0)", (1000 + number, "x" * 4000))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_reader_rolls_back_the_transaction_of_a_killed_writer(folder):
    with Ledger.create(folder, CONFIG) as writer:
        writer.record_rollouts(0, make_rollouts(0))
    killed = subprocess.run([sys.executable, "-c", _KILLED_IN_A_WRITE, str(folder / "ledger.sqlite")], check=False)
    assert killed.returncode == -9 and (folder / "ledger.sqlite-journal").stat().st_size > 0
    with Ledger.reader(folder) as reader:
        assert reader.generation == 1 and reader.collected_steps() == [0]
        assert not [event for event in reader.events() if event.kind == "half"]


def test_a_reader_cannot_write(ledger, folder):
    with Ledger.reader(folder) as reader, pytest.raises(LedgerReadOnly, match="may not write it"):
        reader.record_event("x")


def test_resume_with_another_config(ledger, folder):
    ledger.close()
    longer = {**CONFIG, "steps": 20}
    before = tree(folder)
    with pytest.raises(ConfigChanged, match=r"\n  seed: 0 -> 1\nUndo") as caught:
        Ledger.resume(folder, {**longer, "seed": 1, "trainer": {**CONFIG["trainer"], "ranks": 1}})
    assert [change.path for change in caught.value.refused] == ["seed"]
    after = tree(folder)
    different = {name for name in before | after if before.get(name) != after.get(name)}
    assert different <= {"lock", "ledger.sqlite-shm", "ledger.sqlite-wal"} and not after.get("ledger.sqlite-wal")
    with Ledger.resume(folder, longer) as again:
        assert again.generation == 2  # the refused start claimed nothing
        assert [str(change) for change in again.changes] == ["steps: 10 -> 20"]
        assert again.config()["steps"] == 20
        assert yaml.safe_load((folder / "config.yaml").read_text())["steps"] == 20
        assert again.events()[-1].fields == {"changes": ["steps: 10 -> 20"]}
    fewer_ranks = {**longer, "trainer": {**CONFIG["trainer"], "ranks": 1}}
    with Ledger.resume(folder, fewer_ranks) as again:
        assert again.config()["trainer"]["ranks"] == 1
        assert [change.effect for change in again.changes] == ["bits"]
    with Ledger.resume(folder, {**fewer_ranks, "seed": 1}, accept={"seed"}) as again:
        assert again.config()["seed"] == 1


def test_unfinished_files_of_a_killed_process_are_deleted(ledger, folder):
    ledger.record_rollouts(0, make_rollouts(0))
    ledger.keep(1, [make_completion("r")])
    ledger.close()
    steps = folder / "steps"
    (steps / ".00000002.arrow.1.tmp").write_bytes(b"half")
    (steps / "00000001.partial").write_bytes(b"left over")
    # Renamed, but killed before the index knew:
    hidden, _, _ = step_file.write_hidden_step(
        steps / "00000002.arrow", step_file.rollouts_table(make_rollouts(1), {"a": 1}), 1
    )
    hidden.rename(steps / "00000002.arrow")
    (steps / "00000003.arrow").write_bytes(b"foreign")
    (folder / "config.yaml").write_text("before: a change that the index has\n")
    with Ledger.resume(folder) as again:
        assert yaml.safe_load((folder / "config.yaml").read_text()) == again.config()
        assert again.collected_steps() == [0, 1]
        assert_same(again.rollouts(1), make_rollouts(1))
        assert again.stored_step(1).extra == {"a": 1}
        assert again.events()[-1].kind == "step_rejected"
    names = sorted(path.name for path in steps.iterdir())
    assert names == ["00000001.arrow", "00000002.arrow", "00000003.rejected"]


def test_the_lock_file_names_the_holder(ledger, folder):
    assert json.loads((folder / "lock").read_text())["pid"] > 0


def test_positions_are_assigned_permanently(ledger, folder):
    assert [ledger.draw(0, 0, 4), ledger.draw(1, 0, 4), ledger.draw(0, 1, 2)] == [(0, 4), (4, 4), (8, 2)]
    assert ledger.draw(0, 1, 7) == (8, 2), "what it was given, whatever is asked"
    ledger.rewind(0)
    ledger.close()
    with Ledger.resume(folder) as again:
        assert [again.draw(1, 0, 4), again.draw(2, 0, 3)] == [(4, 4), (10, 3)]


def test_a_run_of_a_version_without_draws_can_be_resumed(ledger, folder):
    ledger.close()
    with sqlite3.connect(folder / "ledger.sqlite") as index:
        index.execute("DROP TABLE draws")
    with Ledger.resume(folder) as again:
        assert again.draw(0, 0, 4) == (0, 4)


def as_earlier_run(folder: Path) -> None:
    """Makes an empty run look as if a version had begun it that counted steps from 0 in names of files."""
    with sqlite3.connect(folder / "ledger.sqlite") as index:
        index.execute("UPDATE meta SET value = '1' WHERE key = 'schema'")


def test_a_run_that_was_begun_with_steps_from_0_keeps_them(ledger, folder):
    assert [ledger.number(-1), ledger.number(0), ledger.step_path(0).name] == [0, 1, "00000001.arrow"]
    ledger.close()
    as_earlier_run(folder)
    for done in range(2):
        with Ledger.resume(folder) as again:
            assert again.collected_steps() == list(range(done)), "its files are those of the same steps"
            assert [again.number(-1), again.number(0)] == [-1, 0]
            again.record_rollouts(done, make_rollouts(done))
            again.keep(done + 1, [make_completion("r")])
    names = sorted(path.name for path in (folder / "steps").iterdir())
    assert names == ["00000000.arrow", "00000001.arrow", "00000002.partial"]
    with Ledger.resume(folder) as again:
        assert_same(again.rollouts(1), make_rollouts(1))
        assert len(again.kept_completions(2)) == 1
        again.rewind(1)
        assert sorted(path.name for path in (folder / "steps").iterdir()) == ["00000000.arrow"]


def test_a_ledger_of_a_later_format_is_refused(ledger, folder):
    ledger.close()
    with sqlite3.connect(folder / "ledger.sqlite") as index:
        index.execute("UPDATE meta SET value = '3' WHERE key = 'schema'")
    with pytest.raises(NotARun, match="its ledger has format 3, this lockstep reads 2 and earlier"):
        Ledger.resume(folder)
