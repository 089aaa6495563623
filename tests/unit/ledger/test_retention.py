"""Long runs: blocks of metrics, which readers do not notice, and step files that are kept by their size."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from ledger_helpers import CONFIG, make_rollouts

from lockstep.ledger import Ledger, metric_blocks
from lockstep.ledger.retention import DELETED_EVENT


@pytest.fixture
def long_run(ledger, monkeypatch):
    monkeypatch.setattr(metric_blocks, "BLOCK_STEPS", 20)
    for step in range(95):
        ledger.record_metrics(
            step, {"time/train_s": 2.0, "rollout/tokens": 10.0, "loss": float(step), "nan": float("nan")}
        )
        ledger.commit(step, {"loss": float(step)})
    ledger.record_checkpoint(69, Path("/checkpoints/70"))
    ledger.record_checkpoint(89, Path("/checkpoints/90"))
    return ledger


def text_of(rows):
    return [(row.step, row.at, row.generation, str(row.values)) for row in rows]


def test_readers_get_the_same_rows_after_compaction(long_run) -> None:
    rows, totals = text_of(long_run.metrics_rows()), long_run.metric_totals(95)
    assert long_run.compact(most=2) == 2  # bounded: the rest follows at the next checkpoint
    assert long_run.compact() == 1 and long_run.compact() == 0
    assert long_run._index.rows("SELECT min(step) FROM metrics") == [(60,)]  # the second newest checkpoint is after 70
    assert text_of(long_run.metrics_rows()) == rows
    assert text_of(long_run.metrics_rows(after=30, before=50)) == rows[31:50]
    assert long_run.metric_totals(95) == totals and totals.count == 95
    assert totals.sums == {"time/train_s": 190.0, "rollout/tokens": 950.0}
    assert long_run.metric_totals(33).sums["time/train_s"] == 66.0
    assert [row.step for row in long_run.metrics_rows(most=10)] == [0, 10, 20, 30, 40, 50, 60, 70, 80, 90, 94]
    assert long_run.newest_metrics("loss", 95).step == 94 and long_run.newest_metrics("loss", 30).step == 29
    assert long_run.newest_metrics("none", 95) is None
    # Where a run goes back to the end of a block, or into it, the last row is in a block.
    assert [row.step for row in long_run.metrics_rows(before=60, most=3)] == [0, 20, 40, 59]
    assert [row.step for row in long_run.metrics_rows(before=41, most=3)] == [0, 20, 40]
    with Ledger.reader(long_run.folder) as reader:
        assert text_of(reader.metrics_rows()) == rows and reader.has_metrics()


def test_the_newest_row_with_a_metric_may_be_in_any_block(ledger, monkeypatch) -> None:
    monkeypatch.setattr(metric_blocks, "BLOCK_STEPS", 10)
    for step in range(75):
        ledger.record_metrics(step, {"loss": float(step), **({"early": 1.0} if step == 3 else {})})
    ledger.record_checkpoint(69, Path("/checkpoints/70"))
    ledger.record_checkpoint(74, Path("/checkpoints/75"))
    assert ledger.compact() == 7
    assert ledger.newest_metrics("early", 75).step == 3 and ledger.newest_metrics("early", 3) is None


def test_a_compacted_step_that_is_trained_again(long_run) -> None:
    long_run.compact()
    long_run.record_metrics(45, {"loss": -1.0})
    assert [row.step for row in long_run.metrics_rows()] == list(range(95))
    assert long_run.metrics_rows(44, 46)[0].values["loss"] == -1.0
    assert long_run.metric_totals(95).count == 95


def test_rewind_into_a_block(long_run) -> None:
    long_run.compact()
    long_run.rewind(33)
    assert [row.step for row in long_run.metrics_rows()] == list(range(33))


def test_a_run_of_an_earlier_version_has_no_blocks(long_run) -> None:
    with long_run._index.transaction() as transaction:
        transaction.execute("DROP TABLE metric_blocks")
    with Ledger.reader(long_run.folder) as reader:
        assert len(reader.metrics_rows()) == 95 and reader.metric_totals(95).count == 95
        assert reader.newest_metrics("none", 95) is None and reader.has_metrics()


def collected(ledger: Ledger, steps: int) -> int:
    """Steps with equally large files. Returns the bytes of one."""
    for step in range(steps):
        ledger.record_rollouts(step, make_rollouts(step, groups=1, size=1))
        ledger.commit(step, {})
    ledger.record_checkpoint(steps - 3, Path("/checkpoints/a"))
    ledger.record_checkpoint(steps - 2, Path("/checkpoints/b"))
    return int(ledger._index.rows("SELECT max(bytes) FROM steps")[0][0])


def test_the_newest_step_files_are_kept_up_to_a_size(ledger) -> None:
    size = collected(ledger, 10)
    assert ledger.delete_unneeded_steps(keep_bytes=3 * size + 1) == [0, 1, 2, 3, 4]
    assert ledger.stored_steps() == [5, 6, 7, 8, 9]
    assert ledger.delete_unneeded_steps(keep_bytes=3 * size + 1) == []
    fields = [event.fields for event in ledger.events() if event.kind == DELETED_EVENT]
    assert [(each["first"], each["last"], each["count"]) for each in fields] == [(1, 5, 5)] and fields[0]["bytes"] > 0


@pytest.mark.parametrize("keep", [0, 1])
def test_what_recovery_needs_is_kept_whatever_its_size(ledger, keep) -> None:
    collected(ledger, 6)
    ledger.delete_unneeded_steps(keep_bytes=keep)
    assert ledger.stored_steps() == [4, 5] and ledger.can_repeat_after(3)


DIES_IN_COMPACTION = """
import os, signal, sys
from pathlib import Path
from lockstep.ledger import Ledger, metric_blocks
metric_blocks.BLOCK_STEPS = 20
with Ledger.resume(Path(sys.argv[1])) as ledger:
    put, left = metric_blocks._put_block, [int(sys.argv[2])]
    def die(transaction, *block):
        put(transaction, *block)
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
    metric_blocks._put_block = die
    ledger.compact()
"""


@pytest.mark.parametrize("made", [1, 3])
def test_a_compaction_that_is_killed_has_not_happened(long_run, made) -> None:
    rows, totals, folder = text_of(long_run.metrics_rows()), long_run.metric_totals(95), long_run.folder
    long_run.close()
    words = [sys.executable, "-c", DIES_IN_COMPACTION, str(folder), str(made)]
    assert subprocess.run(words, timeout=120, env=os.environ).returncode == -signal.SIGKILL
    with Ledger.reader(folder) as reader:
        assert text_of(reader.metrics_rows()) == rows and metric_blocks.count_blocks(reader._index) == 0
    with Ledger.resume(folder) as ledger:
        assert ledger.compact() == 3
        assert text_of(ledger.metrics_rows()) == rows and ledger.metric_totals(95) == totals


KILLED = """
import os, signal, sys
from pathlib import Path
from lockstep.ledger import Ledger
with Ledger.resume(Path(sys.argv[1])) as ledger:
    unlink, left = Path.unlink, [int(sys.argv[2])]
    def die(self, missing_ok=False):
        if self.suffix == ".arrow":
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)
        unlink(self, missing_ok)
    Path.unlink = die
    ledger.delete_unneeded_steps()
"""


@pytest.mark.parametrize("deleted", [0, 2])
def test_a_deletion_that_is_killed_is_finished_by_the_next_process(folder, deleted) -> None:
    with Ledger.create(folder, CONFIG) as ledger:
        collected(ledger, 6)
    killed = subprocess.run([sys.executable, "-c", KILLED, str(folder), str(deleted)], timeout=120, env=os.environ)
    assert killed.returncode == -signal.SIGKILL
    with Ledger.resume(folder) as ledger:
        assert ledger.stored_steps() == [4, 5]
        assert sorted(path.stem for path in (folder / "steps").iterdir()) == ["00000005", "00000006"]


@pytest.mark.parametrize("read", ["metrics_rows", "metric_totals"])
def test_a_reader_loses_no_row_to_a_compaction_meanwhile(tmp_path, read) -> None:
    with Ledger.create(tmp_path / "run", {"recipe": "grpo"}) as ledger, Ledger.reader(tmp_path / "run") as reader:
        with ledger._index.transaction() as transaction:
            for step in range(1005):
                transaction.put("metrics", step=step, values='{"time/train": 1.0}')
        rows, begun = reader._index.rows, []

        def rows_of_a_moment(sql, *arguments):
            if 'SELECT step, at, generation, "values"' in sql or sql.startswith('SELECT "values"'):
                begun.append(sql)
                with ledger._index.transaction() as transaction:
                    metric_blocks.compact(transaction, 1000, 8)
            return rows(sql, *arguments)

        reader._index.rows = rows_of_a_moment
        found = reader.metrics_rows() if read == "metrics_rows" else reader.metric_totals(2000)
        assert begun and (len(found) if read == "metrics_rows" else found.count) == 1005
        assert metric_blocks.count_blocks(ledger._index) == 1
