"""The folder that relative paths in a run's config refer to, wherever the run is resumed from."""

from pathlib import Path

import pytest

from lockstep.ledger.ledger import Ledger
from lockstep.run.planning.working_folder import START_EVENT, in_working_folder, start_folders, working_folder


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run that began in a project folder; the current folder is another one."""
    project, elsewhere = tmp_path / "project", tmp_path / "elsewhere"
    project.mkdir()
    elsewhere.mkdir()
    monkeypatch.chdir(project)
    with Ledger.create(Path("runs/first"), {"name": "first"}) as ledger:
        ledger.record_event(START_EVENT, rows=3, **start_folders(Path("runs/first")))
    monkeypatch.chdir(elsewhere)
    return project


def test_a_run_is_continued_in_the_folder_in_which_it_began(project: Path, tmp_path: Path) -> None:
    assert working_folder(project / "runs/first") == project
    with in_working_folder(Path("../project/runs/first")) as run:
        assert Path.cwd() == project
        assert run.resolve() == project / "runs/first"
    assert Path.cwd() == tmp_path / "elsewhere"


def test_a_project_that_was_moved_is_found(project: Path, tmp_path: Path) -> None:
    project.rename(tmp_path / "archive")
    assert working_folder(tmp_path / "archive/runs/first") == tmp_path / "archive"


def test_a_run_that_was_moved_alone_keeps_its_project(project: Path, tmp_path: Path) -> None:
    (project / "runs/first").rename(tmp_path / "kept")
    assert working_folder(tmp_path / "kept") == project


def test_without_its_folder_a_run_is_continued_in_the_current_one(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (project / "runs/first").rename(tmp_path / "kept")
    (project / "runs").rmdir()
    project.rmdir()
    assert working_folder(tmp_path / "kept") == tmp_path / "elsewhere"
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    assert start_folders(tmp_path) == {}


def test_later_starts_do_not_change_the_folder(project: Path, tmp_path: Path) -> None:
    with Ledger.resume(project / "runs/first") as ledger:
        ledger.record_event(START_EVENT, rows=3, **start_folders(project / "runs/first"))
    assert working_folder(project / "runs/first") == project
