"""The fault matrix: real gloo ranks under a real agent and supervisor, one case per kind of fault, and random cases.

`python -m benchmarks.faults` runs hundreds of such cases.
"""

import functools
import os
import shutil
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import pytest

from benchmarks.faults.case_runner import run
from benchmarks.faults.cases import FAULTS, Case, case, cases, expected
from benchmarks.faults.grading import judge, wrong

JOBS = 4
"""Number of cases at once: they mostly wait."""
CHUNKS, CHUNK = 12, 10
FIRST = {"members": 5}
"""Seeds of the cases that are not slow tests, if not 1."""


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> Iterator[dict[str, Future[dict[str, Any]]]]:
    """One running case of every kind that this session tests, all started at once."""
    wanted = [each.callspec.params["kind"] for each in request.session.items if "kind" in _parameters(each)]
    folder = Path(tempfile.mkdtemp(prefix="lockstep-matrix-"))
    with ThreadPoolExecutor(JOBS) as pool:
        yield {kind: pool.submit(_run, one_of(kind), folder) for kind in dict.fromkeys(wanted)}
    shutil.rmtree(folder, ignore_errors=True)


def _parameters(item: Any) -> dict[str, Any]:
    return item.callspec.params if hasattr(item, "callspec") and item.module.__name__ == __name__ else {}


def _run(each: Case, folder: Path) -> dict[str, Any]:
    return run(each, folder / each.name.replace(" ", "-")).json()


@functools.cache
def one_of(kind: str) -> Case:
    return case(Random(f"{FIRST.get(kind, 1)}-{kind}"), kind, kind)


@pytest.mark.xdist_group("matrix")
@pytest.mark.timeout(400)
@pytest.mark.parametrize("kind", FAULTS)
def test_each_kind_of_fault_is_reported(kind: str, outcomes: dict[str, Future[dict[str, Any]]]) -> None:
    outcome = outcomes[kind].result(300)
    assert wrong([judge(outcome)]) == [], outcome
    ended_as_it_should(outcome)


def ended_as_it_should(outcome: dict[str, Any]) -> None:
    """Check the ends of the ranks: healthy ones still run, innocent ones end with the verdict or gloo's error."""
    found = Case.of(outcome["case"])
    want = expected(found)
    for rank in range(found.world):
        end = outcome["ends"][str(rank)]
        if not want.kinds:
            assert end["code"] is None, end
        elif want.level == "confirmed" and rank not in found.faults and not found.about.call:
            assert end["code"] in (None, 1, -6), end


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_random_cases_are_reported(chunk: int, tmp_path: Path) -> None:
    seed = int(os.environ.get("LOCKSTEP_TEST_SEED", "1"))
    drawn = list(cases(seed, CHUNKS * CHUNK))[chunk::CHUNKS]
    with ThreadPoolExecutor(2) as pool:
        found = [judge(each) for each in pool.map(functools.partial(_run, folder=tmp_path), drawn)]
    assert [each.innocents for each in found] == [()] * len(found), wrong(found)
    assert sum(each.right for each in found) >= CHUNK - 1, wrong(found)
