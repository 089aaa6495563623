"""The fault matrix: real ranks under a real agent and supervisor, one case per kind of fault, and random cases; with
gloo and with a backend whose collectives return when they are enqueued, as with NCCL.

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
from benchmarks.faults.cases import BACKENDS, EMULATED_NCCL, Case, case, cases, expected, kinds_of
from benchmarks.faults.grading import judge, wrong

JOBS = 4
"""Number of cases at once: they mostly wait."""
CHUNKS, CHUNK = 12, 10
FIRST = {"members": 5}
"""Seeds of the cases that are not slow tests, if not 1."""
QUICK_ON_DEVICE = ("stopped", "skips", "kernel", "lag", "slow kernel")
"""The kinds that the quick tests try on the emulated device; with gloo they try all."""
ONE_OF_EACH = [
    pytest.param(
        backend, kind, marks=pytest.mark.slow if backend == EMULATED_NCCL and kind not in QUICK_ON_DEVICE else ()
    )
    for backend in BACKENDS
    for kind in kinds_of(backend)
]
Kind = tuple[str, str]
"""A backend and a kind of fault."""


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> Iterator[dict[Kind, Future[dict[str, Any]]]]:
    """One running case of every kind that this session tests, all started at once."""
    parameters = [_parameters(each) for each in request.session.items]
    wanted = dict.fromkeys((each["backend"], each["kind"]) for each in parameters if "kind" in each)
    folder = Path(tempfile.mkdtemp(prefix="lockstep-matrix-"))
    with ThreadPoolExecutor(JOBS) as pool:
        yield {each: pool.submit(_run, one_of(*each), folder / each[0]) for each in wanted}
    shutil.rmtree(folder, ignore_errors=True)


def _parameters(item: Any) -> dict[str, Any]:
    return item.callspec.params if hasattr(item, "callspec") and item.module.__name__ == __name__ else {}


def _run(each: Case, folder: Path) -> dict[str, Any]:
    return run(each, folder / each.name.replace(" ", "-")).json()


@functools.cache
def one_of(backend: str, kind: str) -> Case:
    return case(Random(f"{FIRST.get(kind, 1)}-{kind}"), kind, kind, backend)


@pytest.mark.xdist_group("matrix")
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("backend", "kind"), ONE_OF_EACH)
def test_each_kind_of_fault_is_reported(backend: str, kind: str, outcomes: dict[Kind, Future[dict[str, Any]]]) -> None:
    outcome = outcomes[backend, kind].result(300)
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
@pytest.mark.parametrize("backend", BACKENDS)
def test_random_cases_are_reported(backend: str, chunk: int, tmp_path: Path) -> None:
    seed = int(os.environ.get("LOCKSTEP_TEST_SEED", "1"))
    drawn = list(cases(seed, CHUNKS * CHUNK, backend=backend))[chunk::CHUNKS]
    with ThreadPoolExecutor(2) as pool:
        found = [judge(each) for each in pool.map(functools.partial(_run, folder=tmp_path), drawn)]
    assert [each.innocents for each in found] == [()] * len(found), wrong(found)
    assert sum(each.right for each in found) >= CHUNK - 1, wrong(found)
