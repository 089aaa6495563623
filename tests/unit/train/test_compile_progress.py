"""Compilation is a stage of the process, with progress while the compiler works."""

import multiprocessing
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lockstep.base.folders import new_run_id
from lockstep.train.compile_progress import COMPILE_STAGE, CPU_TIME, GRAPHS, CompileProgress, show_compilation
from lockstep.watch.beacon import cpu_progress
from lockstep.watch.beacon.beacon_records import BeaconState
from lockstep.watch.beacon.reader import read_beacon
from lockstep.watch.beacon.writer import close_beacon, current_beacon, open_beacon


@pytest.fixture(autouse=True)
def _beacon(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("LOCKSTEP_BEACONS", str(tmp_path))
    open_beacon(new_run_id("compile"), "policy-0", "policy", 0).stage("train")
    yield
    close_beacon(remove=True)


def shown() -> BeaconState:
    state = read_beacon(current_beacon().path)
    assert state is not None
    return state


def test_torch_compile_is_a_stage_and_the_stage_before_returns() -> None:
    stages = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
        stages.append(shown().stage)
        return graph.forward

    show_compilation()
    show_compilation()
    torch.compile(lambda x: x * 2 + 1, backend=backend)(torch.ones(3))
    assert stages == [COMPILE_STAGE] and shown().stage == "train"
    assert shown().counters[GRAPHS].value == 1


def test_only_a_compiler_that_works_makes_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process of its own: children that other tests left may work as well."""
    monkeypatch.setattr(cpu_progress, "SAMPLE_S", 0.2)
    child = multiprocessing.get_context("fork").Process(target=_compile_twice)
    child.start()
    child.join(60)
    assert child.exitcode == 0


def _compile_twice() -> None:
    open_beacon(new_run_id("compile"), "policy-1", "policy", 1).stage("train")
    progress, over = CompileProgress(), threading.Event()
    progress.begin()
    over.wait(1.0)  # as a compiler that waits for a lock
    assert CPU_TIME not in shown().counters
    end = time.process_time() + 0.5
    while time.process_time() < end:
        pass
    over.wait(0.5)
    working = shown().counters[CPU_TIME].value
    assert 100 < working < 5000
    progress.end()
    over.wait(0.5)
    assert shown().counters[CPU_TIME].value == working
