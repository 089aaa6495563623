"""`lockstep check CONFIG`: placement, memory and time, the self-test, and a trial run of two steps."""

import contextlib
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lockstep.cli import app
from lockstep.cli.check import check_plan
from lockstep.cluster.placement.assignment import assign
from lockstep.cluster.placement.bundles import NodeResources
from lockstep.config.loader import load_config
from lockstep.doctor.check.rules.memory_fit import ProcessMemory
from lockstep.doctor.output.findings import CheckReport
from lockstep.models.tiny_model import make_tiny
from lockstep.run.planning.run_plan import PlannedProcess, resource_requests

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A config with a tiny model and data."""
    folder = tmp_path_factory.mktemp("check")
    make_tiny(folder / "model", alphabet="0123456789=", max_length=64)
    subprocess.run([sys.executable, ROOT / "examples" / "sort_data.py", folder / "data"], check=True, timeout=60)
    text = (ROOT / "examples" / "grpo_sort.yaml").read_text()
    text = text.replace("runs/sort-sft/export", str(folder / "model")).replace("runs/sort-data", str(folder / "data"))
    (folder / "run.yaml").write_text(text)
    return folder / "run.yaml"


def check(file: Path, *words: str) -> tuple[int, dict[str, Any]]:
    with contextlib.chdir(file.parent):
        done = CliRunner().invoke(app, ["check", str(file), *words, "--json"])
    assert not isinstance(done.exception, Exception), done.exception
    return done.exit_code, json.loads(done.stdout)


def findings_of(report: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    return [each for each in report["findings"] if each["rung"] == name]


def test_the_collectives_of_a_config_that_fits_are_tested(run_file: Path) -> None:
    _, report = check(run_file)
    assert findings_of(report, "placement")[0]["severity"] == "ok"
    assert {each["id"] for each in findings_of(report, "memory")} >= {"memory", "largest-collective"}
    tried = [each for each in findings_of(report, "collectives") if each["id"] == "collectives"]
    assert len(tried) == 2 and all(each["severity"] == "ok" and "all sums correct" in each["seen"] for each in tried)
    assert next(each["seconds"] for each in report["rungs"] if each["name"] == "collectives") < 30


def test_what_a_run_would_refuse_is_an_error_with_a_fix(run_file: Path) -> None:
    code, report = check(run_file, "rollout.sampling.max_tokens=5000", "token_budget=6000")
    (error,) = [each for each in findings_of(report, "placement") if each["severity"] == "error"]
    assert code == 1 and "max_tokens 5000" in error["seen"] and "set it to" in error["fix"]


def test_deepspeed_settings_that_contradict_the_run_are_an_error_and_not_estimated(run_file: Path) -> None:
    config = load_config(
        run_file, ["trainer.kind=deepspeed", "trainer.deepspeed={zero_optimization: {stage: 2, overlap_com: true}}"]
    )
    report = CheckReport()
    check_plan.check_plan(report, config, [], ProcessMemory("cpu", 8 << 30))
    (error,) = [each for each in report.findings if each.severity == "error"]
    assert error.id == "placement" and "overlap_com" in error.seen and "did you mean overlap_comm?" in error.fix
    (unchecked,) = [each for each in report.findings if each.id == "memory"]
    assert unchecked.severity == "unchecked" and "overlap_com" in unchecked.seen


def test_layers_that_cannot_be_compiled_are_an_error(run_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(run_file, ["trainer.compile=layers"])
    monkeypatch.setattr("lockstep.train.decoder_layers.shutil.which", lambda _: None)
    (error,) = check_plan._find_compiler(config, "cpu")
    assert error.severity == "error" and "g++" in error.fix
    assert check_plan._find_compiler(config, "cuda") == []


def test_a_missing_model_is_the_finding_and_its_size_is_not_estimated(run_file: Path) -> None:
    code, report = check(run_file, "model.path=runs/made-later/export")
    (error,) = [each for each in findings_of(report, "placement") if each["severity"] == "error"]
    assert code == 1 and error["id"] == "model" and "there is no such folder" in error["seen"]
    assert error["fix"].startswith("give an existing") and "model.path" not in error["fix"]
    assert not findings_of(report, "memory")


def test_a_bundle_that_does_not_fit_is_named_with_settings_that_would(
    run_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config(run_file, ["trainer.ranks=8", "cluster.kind=ray", "cluster.device=cuda"])
    node = NodeResources("1", "node-a", "10.0.0.1", 64, 4, 64, 4)

    def survey(config: Any, *_: Any) -> Any:
        processes = [PlannedProcess(f"policy-{k}", "policy", k, "cuda:0", 1, 0) for k in range(8)]
        return assign(resource_requests(config, processes), config.placement, [node])

    monkeypatch.setattr(check_plan, "dry_run", survey)
    found, (error,) = check_plan._dry_run(config, [])
    assert found is None and error.severity == "error" and "policy-" in error.seen
    assert "trainer.ranks" in error.fix


@pytest.mark.slow
def test_the_trial_run_uses_lockstep_train_and_leaves_no_files(run_file: Path) -> None:
    code, report = check(run_file, "--small-first")
    (trial,) = findings_of(report, "small-first")
    assert trial["severity"] == "ok", trial
    assert not (run_file.parent / "runs").exists()
    assert code in (0, 1), "other findings about this host do not matter here"


@pytest.mark.slow
def test_a_failed_trial_run_is_reported_with_the_end_of_its_output(run_file: Path) -> None:
    config = load_config(run_file, ["data.path=nowhere.jsonl"])
    report = CheckReport()
    check_plan.run_trial(report, config, run_file, ["data.path=nowhere.jsonl"])
    (error,) = report.findings
    assert error.severity == "error" and "nowhere.jsonl" in error.seen and "exit code 2" in error.seen


def test_the_trial_run_keeps_placement_and_model(run_file: Path) -> None:
    overrides = check_plan.trial_overrides(load_config(run_file))
    fields = {override.partition("=")[0] for override in overrides}
    assert not {field for field in fields if field.startswith(("model", "cluster", "placement", "trainer.ranks"))}
    tiny = load_config(run_file, overrides)
    assert tiny.steps == 2 and tiny.trainer.ranks == 2
