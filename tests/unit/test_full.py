"""`tests/full.py`, run on a small project of its own."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[1] / "full.py"

SUITE = """
import os
import pytest
pytestmark = pytest.mark.slow

@pytest.mark.parametrize("n", range(3))
def test_ok(n): assert os.environ["LOCKSTEP_TEST_SEED"] == "0"
def test_bad(): assert 1 == 2
@pytest.fixture
def broken():
    yield
    raise ValueError("only at the end")
def test_breaks_at_its_end(broken): pass
@pytest.mark.parametrize("n", range(3))
def test_dies(n):
    if n == 1: os._exit(7)
@pytest.mark.skip
def test_skipped(): pass
"""
OTHER = "def test_quick(): raise AssertionError('is not slow, and not run')"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    tests = tmp_path / "tests"
    tests.mkdir()
    shutil.copy(SCRIPT, tests / "full.py")
    marks = ["slow: x", "ray: x", "vllm: x", "deepspeed: x"]
    (tmp_path / "pyproject.toml").write_text(f"[tool.pytest.ini_options]\nmarkers = {marks}\n")
    (tests / "test_suite.py").write_text(SUITE)
    (tests / "test_other.py").write_text(OTHER)
    return tmp_path


def full(project: Path, *arguments: str) -> tuple[int, list[str]]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # each of some thirty processes starts in a third of the time
    done = subprocess.run(
        [sys.executable, str(project / "tests" / "full.py"), *arguments],
        env=environment, capture_output=True, text=True, timeout=120, cwd=project,
    )  # fmt: skip
    return done.returncode, (done.stdout + done.stderr).strip().splitlines()


def results(project: Path) -> dict[str, dict[str, Any]]:
    rows = json.loads((project / "tests" / "full-results.json").read_text())
    return {row["node"].partition("::")[2]: row for row in rows}


def test_every_outcome_is_told_and_recorded(project: Path) -> None:
    code, said = full(project)
    assert code == 1
    assert said[-1] == "5 passed, 3 failed"
    outcomes = {name: row["outcome"] for name, row in results(project).items()}
    assert outcomes == {
        "test_ok[0]": "passed", "test_ok[1]": "passed", "test_ok[2]": "passed", "test_bad": "failed",
        "test_breaks_at_its_end": "failed", "test_dies[0]": "passed", "test_dies[1]": "failed",
        "test_dies[2]": "passed", "test_skipped": "skipped",
    }  # fmt: skip
    assert results(project)["test_bad"]["machine"].keys() == {"cores", "python", "torch"}
    assert any("assert 1 == 2" in line for line in said), "what failed is shown"

    before = results(project)
    code, said = full(project)
    assert code == 1 and said[-1] == "5 passed, 3 failed"
    assert any(line.startswith("5 had passed with these sources") for line in said)
    assert not any("test_ok" in line for line in said), "they are not run again"
    assert {name: row["at"] for name, row in results(project).items() if row["outcome"] == "passed"} == {
        name: row["at"] for name, row in before.items() if row["outcome"] == "passed"
    }

    suite = project / "tests" / "test_suite.py"
    suite.write_text(SUITE.replace("1 == 2", "1 == 1").replace("os._exit(7)", "pass").replace("raise ValueError", "id"))
    code, said = full(project)
    assert (code, said[-1]) == (0, "8 passed, 0 failed")
    assert any("test_ok" in line for line in said), "other sources: all are run"
    assert full(project, "--again", "--match", "test_bad")[1][-1] == "1 passed, 0 failed"


def test_what_failed_beside_others_runs_once_more_alone(project: Path) -> None:
    (project / "tests" / "test_suite.py").write_text(
        "import os, pathlib, pytest\npytestmark = pytest.mark.slow\n"
        f"came = pathlib.Path({str(project)!r}) / 'came'\n"
        "def test_starved():\n    first = not came.exists()\n    came.touch()\n    assert not first\n"
        "def test_ok(): pass\n"
    )
    code, said = full(project, "--jobs", "2")
    assert (code, said[-1]) == (0, "2 passed, 0 failed"), said
    assert "1 failed beside others and run once more, alone" in said
    assert results(project)["test_starved"]["outcome"] == "passed"
    (project / "came").unlink()
    assert full(project, "--jobs", "1", "--again")[0] == 1, "alone already: what fails has failed"


def test_nothing_found_and_nothing_collected_is_no_success(project: Path) -> None:
    assert full(project, "--match", "nothing like it") == (1, ["0 passed, 0 failed"])
    (project / "tests" / "test_other.py").write_text("import nothing_like_it")
    code, said = full(project)
    assert code == 1 and any("nothing_like_it" in line for line in said)
    assert not (project / "tests" / "full-results.json").exists()


@pytest.fixture(scope="module")
def module() -> ModuleType:
    spec = importlib.util.spec_from_file_location("full_under_test", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("jobs", [1, 2])
def test_slices_are_disjoint_and_whole_and_fit(module: ModuleType, tmp_path: Path, jobs: int) -> None:
    file = tmp_path / "results.json"
    nodes = [f"tests/test_{'xyz'[n % 3]}.py::test_{'pq'[n % 2]}[{n}]" for n in range(200)]
    row = {"seed": 0, "outcome": "passed", "source": "s", "at": "", "machine": {}}
    file.write_text(json.dumps([{"node": node, "seconds": 10.0 + n, **row} for n, node in enumerate(nodes[:150])]))
    known = module.Results(file)
    parts = module.slices(nodes, 1, known, jobs)
    assert sorted(node for part in parts for node in part) == sorted(nodes)
    costs = [sum(known.estimate(node) for node in part) for part in parts]
    assert max(costs) <= module.SLICE_S * jobs
    following = [known.estimate(part[0]) for part in parts[1:]]
    assert all(sum(each) > module.SLICE_S * jobs for each in zip(costs, following, strict=False)), "one more fits"
    assert parts == module.slices(list(reversed(nodes)), 1, known, jobs), "the same on every machine"
    assert parts != module.slices(nodes, 2, known, jobs)
    for batch in (cut := module.batches(parts[0], known)):
        assert len({node.partition("::")[0] for node in batch.nodes}) == 1, "tests of a file share its fixtures"
        assert len(batch.nodes) <= module.BATCH
    assert sorted(node for batch in cut for node in batch.nodes) == sorted(parts[0])
