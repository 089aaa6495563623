"""The ledger on a disk that fills up: a small tmpfs, and a limit on file sizes."""

import contextlib
import errno
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "ledger"))

from ledger_helpers import CONFIG, assert_same, make_completion, make_rollouts

from benchmarks.faults import machine_faults
from benchmarks.faults.machine_faults import CannotInject, fill
from lockstep.ledger import Ledger, LedgerFull, LedgerReadOnly, metric_blocks
from lockstep.ledger.durable_files import disk_full_as_ledger_error, replace_file


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    yield from mounted(tmp_path, "size=1m")


@pytest.fixture
def few_inodes(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for 40 files and folders."""
    yield from mounted(tmp_path, "size=64m,nr_inodes=40")


def mounted(tmp_path: Path, options: str) -> Iterator[Path]:
    with contextlib.ExitStack() as stack:
        try:
            yield stack.enter_context(machine_faults.small_disk(tmp_path / "disk", options))
        except CannotInject as error:
            pytest.skip(str(error))


@contextlib.contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def assert_as_before(ledger: Ledger, steps: list[int]) -> None:
    assert ledger.collected_steps() == steps
    for step in steps:
        assert_same(ledger.rollouts(step), make_rollouts(step))
    names = {path.name for path in (ledger.folder / "steps").iterdir() if path.suffix != ".partial"}
    assert names == {ledger.step_path(step).name for step in steps}


def test_no_room_for_a_step_file(small_disk):
    with Ledger.create(small_disk / "run", CONFIG) as ledger:
        ledger.record_rollouts(0, make_rollouts(0))
        ballast = fill(small_disk, 100_000)
        big = make_rollouts(1, length=5000)
        with pytest.raises(LedgerFull, match="make room; then resume the run") as caught:
            ledger.record_rollouts(1, big)
        assert caught.value.path == ledger.step_path(1)
        assert caught.value.needed > 3 * 4 * 5000 * 12 and 0 <= caught.value.free <= 100_000
        assert_as_before(ledger, [0])
        ledger.record_event("still", alive=True)  # small things still fit
        ballast.unlink()
        ledger.record_rollouts(1, big)
        assert_same(ledger.rollouts(1), big)


def test_no_byte_left(small_disk):
    with Ledger.create(small_disk / "run", CONFIG) as ledger:
        ledger.record_rollouts(0, make_rollouts(0))
        ledger.keep(1, [make_completion("kept")])
        ballast = fill(small_disk, 0)
        long = "x" * 300_000
        for write in (
            lambda: ledger.record_rollouts(1, make_rollouts(1)),
            lambda: ledger.keep(1, [make_completion("more", 5000)]),
            lambda: ledger.record_event("long", text=long),
            lambda: ledger.record_metrics(0, {long: 1.0}),
            lambda: Ledger.create(small_disk / "another", CONFIG),
        ):
            with pytest.raises(LedgerFull):
                write()
            assert_as_before(ledger, [0])
            assert [one.request for one in ledger.kept_completions(1)] == ["kept"]
        assert sorted(path.name for path in small_disk.iterdir()) == ["ballast", "run"]
        ballast.unlink()
        ledger.keep(1, [make_completion("more", 5000)])
        ledger.record_rollouts(1, make_rollouts(1))
        ledger.commit(0, {})
    with Ledger.resume(small_disk / "run") as again:
        assert_as_before(again, [0, 1])
        assert again.last_committed_step() == 0 and again.events() == []


def test_no_room_for_a_compaction(small_disk, monkeypatch):
    monkeypatch.setattr(metric_blocks, "BLOCK_STEPS", 20)
    with Ledger.create(small_disk / "run", CONFIG) as ledger:
        for step in range(65):
            ledger.record_metrics(step, {"loss": float(step), "x" * 2000: 1.0})
        ledger.record_checkpoint(59, small_disk / "a")
        ledger.record_checkpoint(64, small_disk / "b")
        rows, ballast = ledger.metrics_rows(), fill(small_disk, 0)
        with pytest.raises(LedgerFull):
            ledger.compact()
        assert ledger.metrics_rows() == rows and metric_blocks.count_blocks(ledger._index) == 0
        ballast.unlink()
        assert ledger.compact() == 3 and ledger.metrics_rows() == rows


def test_every_amount_of_free_space(small_disk):
    """From no space to enough, in steps smaller than any write: each file is written completely or not at all."""
    with Ledger.create(small_disk / "run", CONFIG) as ledger:
        step, refused = 0, 0
        for free_bytes in range(0, 60_000, 4096):
            ballast = fill(small_disk, free_bytes)
            try:
                ledger.record_rollouts(step, make_rollouts(step))
                step += 1
            except LedgerFull:
                refused += 1
            assert_as_before(ledger, list(range(step)))
            ballast.unlink()
        assert step > 0 and refused > 0


def test_the_file_size_limit(tmp_path):
    with Ledger.create(tmp_path / "run", CONFIG) as ledger:
        ledger.record_rollouts(0, make_rollouts(0))
        ledger.keep(1, [make_completion("kept")])
        with file_size_limit(4096):
            with pytest.raises(LedgerFull, match=r"may not write files over 4,096 bytes: raise it with `ulimit -f`"):
                ledger.record_rollouts(1, make_rollouts(1, length=500))
            with pytest.raises(LedgerFull, match="ulimit"):
                ledger.keep(1, [make_completion("more", 5000)])
            with pytest.raises(LedgerFull, match="ulimit"):
                ledger.record_event("long", text="x" * 300_000)
            with pytest.raises(LedgerFull):
                Ledger.create(tmp_path / "another", CONFIG)
        assert [path.name for path in tmp_path.iterdir()] == ["run"]
        assert_as_before(ledger, [0])
        assert [one.request for one in ledger.kept_completions(1)] == ["kept"]
        ledger.record_rollouts(1, make_rollouts(1))
        assert_as_before(ledger, [0, 1])


def test_a_run_on_a_read_only_medium(small_disk):
    with Ledger.create(small_disk / "run", CONFIG) as ledger:
        ledger.record_rollouts(0, make_rollouts(0))
        ledger.commit(0, {})
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True, timeout=20)
    with Ledger.reader(small_disk / "run") as reader:
        assert reader.last_committed_step() == 0
        assert_as_before(reader, [0])
    why = f"the file system of {small_disk}.* is mounted read-only: choose another folder, or mount it for writing"
    with pytest.raises(LedgerReadOnly, match=why) as caught:
        Ledger.create(small_disk / "another", CONFIG)
    assert caught.value.path.is_relative_to(small_disk)
    with pytest.raises((LedgerReadOnly, OSError), match=r"[Rr]ead-only"):
        Ledger.resume(small_disk / "run")
    with pytest.raises(LedgerReadOnly, match=why):
        replace_file(small_disk / "run" / "report.html", b"x")


def test_no_inode_left(few_inodes):
    with Ledger.create(few_inodes / "run", CONFIG) as ledger:
        ledger.record_rollouts(0, make_rollouts(0))
        ballast = few_inodes / "ballast"
        ballast.mkdir()
        with contextlib.suppress(OSError):
            for number in range(1000):
                (ballast / str(number)).touch()
        why = r"no inodes left \(0 of 40\), though [\d,]{9,} bytes are free: remove files, .*`df -i "
        for write in (
            lambda: ledger.record_rollouts(1, make_rollouts(1)),
            lambda: Ledger.create(few_inodes / "another", CONFIG),
            lambda: replace_file(few_inodes / "run" / "report.html", b"x"),
        ):
            with pytest.raises(LedgerFull, match=why) as caught:
                write()
            assert caught.value.path.is_relative_to(few_inodes)
        assert_as_before(ledger, [0])
        for each in list(ballast.iterdir())[:9]:
            each.unlink()
        ledger.record_rollouts(1, make_rollouts(1))
        assert_as_before(ledger, [0, 1])


def test_an_index_without_an_inode_for_its_journal(few_inodes):
    Ledger.create(few_inodes / "run", CONFIG).close()
    with contextlib.suppress(OSError):
        for number in range(1000):
            (few_inodes / str(number)).touch()
    with pytest.raises(LedgerFull, match="no inodes left"):
        Ledger.resume(few_inodes / "run")
    (few_inodes / "0").unlink()
    (few_inodes / "1").unlink()
    (few_inodes / "2").unlink()
    Ledger.resume(few_inodes / "run").close()


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (errno.EDQUOT, f"the disk quota of user {os.getuid()} is used up: make room, or ask for more"),
        (errno.EROFS, "is mounted read-only: choose another folder"),
        (errno.EFBIG, "allows no larger file"),
        (errno.ENOSPC, "bytes free: make room"),
    ],
    ids=errno.errorcode.get,
)
def test_what_the_system_says_is_explained(tmp_path, code, words):
    with (
        pytest.raises((LedgerFull, LedgerReadOnly), match=words) as caught,
        disk_full_as_ledger_error(tmp_path / "x", 9),
    ):
        raise OSError(code, os.strerror(code))
    assert caught.value.path == tmp_path / "x" and str(tmp_path / "x") in str(caught.value)
