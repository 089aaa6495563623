"""Lockstep's side of a comparison: `python -m benchmarks.lockstep_side FOLDER`. See `benchmarks.side_process`.

`FOLDER/lockstep.json` contains the run's config and the table of lengths. The recipe is unchanged; between its steps
the run waits for its turn, and each request's `max_tokens` is the length of its row."""

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.length_table import force_requests
from benchmarks.resource_usage import cpu_ns
from benchmarks.side_process import Pacer, Stopped
from lockstep.config.loader import check_config
from lockstep.config.recipes import PPOConfig, PreferenceConfig, SFTConfig
from lockstep.data.sample_sources import DocumentSource
from lockstep.recipes.grpo import grpo
from lockstep.recipes.ppo import ppo
from lockstep.recipes.preference import preference
from lockstep.recipes.sft import sft
from lockstep.run.errors import Interrupted
from lockstep.run.lifecycle import open_run
from lockstep.run.planning.prepare import prepare_run
from lockstep.run.run import Run
from lockstep.run.run_id import RUN_ID_FILE
from lockstep.watch.beacon.reader import read_beacons


class Detail:
    """CPU time of every process of the run by stage; time between two stages belongs to the earlier one."""

    def __init__(self, processes: dict[str, int]) -> None:
        self._processes = processes
        self.spent: dict[str, dict[str, float]] = {}
        """Milliseconds by stage and process."""
        self._last: dict[str, int] = {}
        self._own_ns = 0
        self.on = False

    def mark(self, name: str) -> None:
        """Count the CPU time since the last mark for the stage `name`, without the cost of measuring."""
        if not self.on:
            return
        began = time.thread_time_ns()
        own = {
            "controller": cpu_ns(self._processes["controller"]) - self._own_ns
        }  # first, as the rest is the cost of measuring
        now = own | {process: cpu_ns(pid) for process, pid in self._processes.items() if process != "controller"}
        if self._last:
            here = self.spent.setdefault(name, dict.fromkeys(now, 0.0))
            for process, value in now.items():
                here[process] += (value - self._last[process]) / 1e6
        self._last = now
        self._own_ns += time.thread_time_ns() - began

    def pause(self) -> None:
        """Do not count the time until the next mark."""
        self._last = {}


class Paced:
    """A run that waits for its turn before each step, and is otherwise unchanged."""

    def __init__(self, run: Run, pacer: Pacer) -> None:
        self._run, self._pacer, self._stage = run, pacer, run.stage
        run.stage = self.stage  # type: ignore[method-assign]  # the run itself enters stages as well
        names = {state.name: state.pid for state in read_beacons((run.folder / RUN_ID_FILE).read_text().strip())}
        self._detail = Detail(names | {"controller": os.getpid()})
        self._before = ""
        pacer.facts |= {"processes": names | {"controller": os.getpid()}, "detail": self._detail.spent}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._run, name)

    def steps(self) -> Iterator[int]:
        for step in self._run.steps():
            self._detail.mark(f"after {self._before}")
            self._detail.pause()
            self._pacer.begin()
            self._detail.on = self._pacer.detail
            self._detail.mark("")
            yield step
        self._pacer.begin()  # reports that the last step is done

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        self._detail.mark(f"after {self._before}")
        with self._stage(name):
            yield
        self._detail.mark(name)
        self._before = name


class CountedDocuments:
    """Documents that count their tokens when they are used."""

    def __init__(self, source: DocumentSource, pacer: Pacer) -> None:
        self._source, self._pacer = source, pacer

    def take(self, start: int, count: int) -> Any:
        documents = self._source.take(start, count)
        tokens = sum(document.tokens.size for document in documents)
        self._pacer.facts["tokens"] = self._pacer.facts.get("tokens", 0) + tokens
        return documents

    @property
    def has_images(self) -> bool:
        return self._source.has_images

    def counts(self, documents: Any) -> dict[str, float]:
        return self._source.counts(documents)


def main(folder: Path) -> None:
    pacer = Pacer()
    order = json.loads((folder / "lockstep.json").read_text())
    prepared = prepare_run(check_config(order["config"], "benchmark"), None)
    try:
        with open_run(prepared) as run:
            paced: Any = Paced(run, pacer)
            if isinstance(run.config, SFTConfig):
                data = run.roles.data
                counted: Any = CountedDocuments(data.samples, pacer)
                run.roles.data = replace(data, samples=counted)
                _until_stopped(lambda: sft(paced, run.config))
            elif isinstance(run.config, PreferenceConfig):
                _until_stopped(lambda: preference(paced, run.config))
            else:
                force_requests(run.engines, np.asarray(order["lengths"]))
                recipe = ppo if isinstance(run.config, PPOConfig) else grpo
                _until_stopped(lambda: recipe(paced, run.config))
    except Interrupted:
        return


def _until_stopped(recipe: Any) -> None:
    try:
        recipe()
    except Stopped as stopped:
        raise Interrupted("measured") from stopped
    raise SystemExit("the run ended before it was stopped: too few steps were asked for")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
