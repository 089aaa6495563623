"""A damaged index is an error that names the file and a remedy, whatever the damage is."""

import os
import shutil
import sqlite3
import zlib
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ledger_helpers import CONFIG, make_rollouts

from lockstep.ledger import Ledger, load_blocks, metric_blocks, retention
from lockstep.ledger.errors import IndexDamaged, LedgerError, NotARun
from lockstep.ledger.rank_loads import RankLoads

OTHER_SUMS = b'{"policy": [{"steps": 1}]}'


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "run"
    with Ledger.create(folder, CONFIG) as ledger, pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(metric_blocks, "BLOCK_STEPS", 1)
        monkeypatch.setattr(load_blocks, "BLOCK_STEPS", 1)
        monkeypatch.setattr(retention, "REMARK_STEPS", 0)
        for step in range(3):
            ledger.record_rollouts(step, make_rollouts(step))
            ledger.record_metrics(step, {"loss": 1.0})
            ledger.record_event("seen", text="x" * 500)
            ledger.record_rank_loads(step, {"policy": RankLoads([1.0], [-1.0], [0.0], [10], [10.0])})
            ledger.commit(step, {})
            ledger.record_checkpoint(step, folder / "checkpoints" / f"{step + 1:08d}")
        assert ledger.compact(most=1) == 1
    return folder


def read_all(folder: Path) -> None:
    with Ledger.reader(folder) as ledger:
        ledger.config(), ledger.events(), ledger.commits(), ledger.metrics_rows(), ledger.evaluations()
        ledger.metric_totals(100), ledger.newest_metrics("none", 100), ledger.metrics_rows(most=10)
        ledger.rank_loads(), ledger.rank_loads(most=2), ledger.rank_load_sums()
        ledger.collected_steps(), ledger.steps_done()


def copied(whole: Path, target: Path) -> Path:
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(whole, target)
    return target / "ledger.sqlite"


@pytest.mark.parametrize(
    ("damage", "kind"),
    [
        (lambda data: b"", NotARun),
        (lambda data: b"not a database" * 100, NotARun),
        (lambda data: b"\0" * 100 + data[100:], NotARun),
        (lambda data: data[: len(data) // 2], IndexDamaged),
        (lambda data: data[:4096] + b"\xff" * 4096 + data[8192:], IndexDamaged),
    ],
    ids=["empty", "text", "header", "cut", "torn page"],
)
def test_damage_names_the_file(whole: Path, tmp_path: Path, damage, kind) -> None:
    file = copied(whole, tmp_path / "run")
    file.write_bytes(damage(file.read_bytes()))
    for use in (read_all, lambda folder: Ledger.resume(folder).close()):
        with pytest.raises(LedgerError) as caught:
            use(tmp_path / "run")
        assert isinstance(caught.value, kind), caught.value
        assert str(tmp_path / "run") in str(caught.value) and "ledger.sqlite" in str(caught.value)


@pytest.mark.parametrize(
    "sql",
    [
        "DELETE FROM meta", "DELETE FROM meta WHERE key = 'generation'", "UPDATE meta SET value = 'x'",
        "UPDATE meta SET value = '{' WHERE key = 'config'", "UPDATE events SET fields = '['",
        "UPDATE meta SET value = '[1]' WHERE key = 'config'", 'UPDATE metrics SET "values" = \'[[\'',
        "UPDATE events SET fields = x'ff'", "DROP TABLE events", "UPDATE meta SET value = 'y' WHERE key = 'schema'",
        "UPDATE commits SET stats = '{\"$lockstep\": \"date\"}'",
        f"UPDATE events SET fields = '{'[' * 5000}'",
        "UPDATE metric_blocks SET rows = x'00'", "UPDATE metric_blocks SET rows = 'text'",
        f"UPDATE metric_blocks SET rows = x'{zlib.compress(b'[1]').hex()}'",
        f"UPDATE metric_blocks SET rows = x'{zlib.compress(b'[').hex()}'", "UPDATE metric_blocks SET sums = '[1]'",
        "UPDATE load_blocks SET rows = x'00'", "UPDATE load_blocks SET sums = 'text'",
        f"UPDATE load_blocks SET rows = x'{zlib.compress(b'[1]').hex()}'",
        f"UPDATE load_blocks SET sums = x'{zlib.compress(b'[1]').hex()}'",
        f"UPDATE load_blocks SET sums = x'{zlib.compress(OTHER_SUMS).hex()}'",
        "UPDATE loads SET load = '{'", "UPDATE loads SET load = '{\"x\": [1]}'", "UPDATE loads SET load = '[1]'",
    ],
)  # fmt: skip
def test_values_that_nobody_wrote(whole: Path, tmp_path: Path, sql: str) -> None:
    file = copied(whole, tmp_path / "run")
    with sqlite3.connect(file) as connection:
        connection.execute(sql)
    connection.close()
    with pytest.raises(LedgerError) as caught:
        read_all(tmp_path / "run")
    assert str(tmp_path / "run") in str(caught.value), caught.value


def test_a_row_that_cannot_be_compacted(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metric_blocks, "BLOCK_STEPS", 1)
    file = copied(whole, tmp_path / "run")
    with sqlite3.connect(file) as connection:
        connection.execute("UPDATE metrics SET \"values\" = '[['")
    connection.close()
    with Ledger.resume(tmp_path / "run") as ledger:
        with pytest.raises(IndexDamaged, match="metrics"):
            ledger.compact()
        with pytest.raises(IndexDamaged, match="metrics"):
            ledger.metric_totals(100)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    places=st.lists(st.tuples(st.floats(0, 0.9999), st.integers(0, 255), st.integers(1, 300)), min_size=1, max_size=5)
)
def test_any_damage_is_read_or_refused(whole: Path, tmp_path: Path, places: list[tuple[float, int, int]]) -> None:
    file = copied(whole, tmp_path / "run")
    data = bytearray(file.read_bytes())
    for where, value, count in places:
        at = int(where * len(data))
        data[at : at + count] = bytes([value]) * len(data[at : at + count])
    file.write_bytes(data)
    try:
        read_all(tmp_path / "run")
    except LedgerError as error:
        assert str(tmp_path / "run") in str(error)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anything")
def test_an_index_that_this_user_may_not_write(whole: Path, tmp_path: Path) -> None:
    file = copied(whole, tmp_path / "run")
    file.chmod(0o400)
    with pytest.raises(LedgerError, match="may not write it"):
        Ledger.resume(tmp_path / "run")
