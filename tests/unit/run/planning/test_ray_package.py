"""Packages and submissions of Ray jobs."""

from pathlib import Path
from typing import Any

import pytest

from lockstep.cli.train_submit import submit_run
from lockstep.cluster.ray.ray_jobs import RayJob, SubmissionError, dashboard_address
from lockstep.config.loader import check_config, load_config
from lockstep.config.recipes import GRPOConfig, SFTConfig
from lockstep.run.errors import RunRefused
from lockstep.run.planning import ray_package
from lockstep.run.planning.ray_package import CONFIG_FILE, build_ray_package


def config(**changes: Any) -> SFTConfig | GRPOConfig:
    values: dict[str, Any] = {
        "recipe": "grpo", "name": "code", "folder": "/shared/runs", "steps": 3, "model": {"path": "some-org/model"},
        "data": {"path": "data/rows.jsonl"}, "cluster": "ray",
        "reward": {"terms": [{"kind": "function", "path": "code/reward.py:score"}]}, **changes,
    }  # fmt: skip
    return check_config(values, "test")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    here = tmp_path / "here"
    for name in ("data/rows.jsonl", "code/reward.py", "code/helper.py", "code/notes.txt", "model/config.json"):
        (here / name).parent.mkdir(parents=True, exist_ok=True)
        (here / name).write_text("x" * 1000)
    monkeypatch.chdir(here)
    return here


def sent(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_only_files_named_in_the_config_are_packed(here: Path, tmp_path: Path) -> None:
    (tmp_path / "to").mkdir()
    staged = build_ray_package(config(steps=7), tmp_path / "to")
    assert sent(staged.folder) == {CONFIG_FILE, "data/rows.jsonl", "code/reward.py", "code/helper.py"}
    assert load_config(staged.folder / CONFIG_FILE) == config(steps=7)
    assert staged.absolute_paths == []


def test_folders_are_packed_and_absolute_paths_are_not(here: Path, tmp_path: Path) -> None:
    (tmp_path / "to").mkdir()
    data = str(here / "data" / "rows.jsonl")
    staged = build_ray_package(config(model={"path": "model"}, data={"path": data}), tmp_path / "to")
    assert "model/config.json" in sent(staged.folder) and "data/rows.jsonl" not in sent(staged.folder)
    assert staged.absolute_paths == [data]


def test_the_files_of_a_mixture_are_sent_and_nothing_else(here: Path, tmp_path: Path) -> None:
    (tmp_path / "to").mkdir()
    (here / "unrelated.txt").write_text("x")
    staged = build_ray_package(config(data={"mixture": [{"path": "data/rows.jsonl"}]}), tmp_path / "to")
    assert "data/rows.jsonl" in sent(staged.folder) and "unrelated.txt" not in sent(staged.folder)


def test_what_would_be_lost_or_is_too_large_is_refused(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "to").mkdir()
    with pytest.raises(RunRefused, match=r"folder 'runs' is relative.*deleted after it"):
        build_ray_package(config(folder="runs"), tmp_path / "to")
    (tmp_path / "outside.jsonl").write_text("x")
    with pytest.raises(RunRefused, match="outside of the working directory"):
        build_ray_package(config(data={"path": "../outside.jsonl"}), tmp_path / "to")
    monkeypatch.setattr(ray_package, "MAX_PACKAGE_BYTES", 3000)
    (here / "data" / "rows.jsonl").write_text("x" * 5000)
    with pytest.raises(RunRefused, match=r"the largest is data/rows\.jsonl: put it on a file system"):
        build_ray_package(config(), tmp_path / "to")


def test_the_address_must_be_a_dashboards() -> None:
    assert dashboard_address("127.0.0.1:8265") == dashboard_address("http://127.0.0.1:8265/") == "http://127.0.0.1:8265"
    for address in ("ray://127.0.0.1:10001", "http://", ""):
        with pytest.raises(SubmissionError, match=r"http://127\.0\.0\.1:8265"):
            dashboard_address(address)


def test_submissions_that_are_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert submit_run("127.0.0.1:1", config(cluster="local"), None, []) == 2
    assert "set cluster=ray" in capsys.readouterr().err
    assert submit_run("127.0.0.1:1", None, Path("runs/x"), []) == 2
    assert "absolute path" in capsys.readouterr().err
    assert submit_run("ray://127.0.0.1:1", config(), None, []) == 2
    assert "another service of Ray" in capsys.readouterr().err


def test_no_secret_becomes_part_of_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    for override in ("cluster.env.HF_TOKEN=abc", "cluster.env.OTHER=hf_" + "a1B2c3D4" * 4):
        assert submit_run("127.0.0.1:1", None, Path("/runs/x"), ["steps=3", override]) == 2
        name, _, value = override.partition("=")
        said = " ".join(capsys.readouterr().err.split())
        assert name in said and "dashboard" in said and value not in said


def test_resume_takes_an_absolute_path_on_the_cluster(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert submit_run("127.0.0.1:1", config(), Path("runs/x"), []) == 2
    assert "absolute path" in " ".join(capsys.readouterr().err.split())


def test_ctrl_c_during_submission_names_the_job(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The dashboard may have it, or not."""

    def interrupted(address: str, *what: object) -> RayJob:
        asked: Any = what[-1]
        for name in ("x-1", "x-2"):  # the first was sent away
            asked(RayJob(address, name))
        raise KeyboardInterrupt

    monkeypatch.setattr("lockstep.cli.train_submit.submit_job", interrupted)
    assert submit_run("http://127.0.0.1:1", None, Path("/runs/x"), []) == 130
    said = " ".join(capsys.readouterr().err.split())
    assert "job x-2 may have been submitted" in said and "ray job stop --address http://127.0.0.1:1 x-2" in said
