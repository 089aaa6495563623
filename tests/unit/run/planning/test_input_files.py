"""The inputs of a run that a Python program gave."""

import hashlib
import stat
from pathlib import Path

import pytest

from lockstep.ledger.errors import FolderExists
from lockstep.ledger.ledger import Ledger
from lockstep.run.errors import RunRefused
from lockstep.run.planning.input_files import check_inputs, check_known_inputs, input_path, written_inputs

CONTENT = b'{"prompt": "a"}\n'


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "name"


def inputs(run: Path, content: bytes = CONTENT) -> dict[Path, bytes]:
    return {input_path(run, "data", hashlib.sha256(content).hexdigest(), ".jsonl"): content}


def test_a_run_takes_its_inputs_over(run: Path) -> None:
    given = inputs(run)
    with written_inputs(run, given):
        Ledger.create(run, {"name": "x"}, 0o750).close()
    (file,) = given
    assert file.read_bytes() == CONTENT
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o750 and stat.S_IMODE(file.stat().st_mode) == 0o640
    check_inputs(run)
    file.write_bytes(CONTENT * 2)
    with pytest.raises(RunRefused, match=r"1 input file of .*name changed since the run began \(data-"):
        check_inputs(run)


def test_without_a_run_nothing_stays(run: Path) -> None:
    with pytest.raises(KeyError), written_inputs(run, inputs(run)):
        assert all(path.is_file() for path in inputs(run))
        raise KeyError
    assert not run.exists()


def test_the_inputs_of_another_process_stay(run: Path) -> None:
    with written_inputs(run, inputs(run, b"1")):
        with written_inputs(run, inputs(run, b"2")):
            pass
        assert [path.name for path in (run / "inputs").iterdir()] == [path.name for path in inputs(run, b"1")]


def test_a_folder_with_other_things_is_not_touched(run: Path) -> None:
    (run / "inputs").mkdir(parents=True)
    (run / "notes").touch()
    with written_inputs(run, inputs(run)), pytest.raises(FolderExists):
        Ledger.create(run, {"name": "x"})
    assert sorted(path.name for path in run.iterdir()) == ["inputs", "notes"] and not list((run / "inputs").iterdir())


def test_a_run_resumes_only_with_its_own_inputs(run: Path) -> None:
    with written_inputs(run, inputs(run)):
        Ledger.create(run, {"name": "x"}).close()
    check_known_inputs(run, inputs(run))
    with pytest.raises(RunRefused, match="cannot resume with other inputs than it began with, and data differs"):
        check_known_inputs(run, inputs(run, b"other"))
