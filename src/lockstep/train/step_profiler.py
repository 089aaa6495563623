"""Records chosen optimizer steps of a rank with torch.profiler, and writes a trace that Perfetto opens."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from lockstep.base.folders import make_folder, set_access
from lockstep.config.trainer import ProfileConfig

log = logging.getLogger(__name__)

PROFILES_FOLDER = "profiles"
"""In the folder of the run."""


class StepProfiler:
    """The profile of one rank. A rank that is restarted within the steps records the rest of them.

    Args:
        folder: the folder of the run.
        name: the rank's, such as `policy-rank1`.
    """

    def __init__(self, config: ProfileConfig, folder: Path, name: str) -> None:
        self._config, self._folder, self._name = config, folder / PROFILES_FOLDER, name
        self._profiler: profile | None = None
        self._first = self._last = 0
        """The first and the newest step that were recorded."""

    @contextmanager
    def record(self, step: int) -> Iterator[None]:
        """Around an optimizer step. `step` counts from 1. Never fails the step because of the profile."""
        config = self._config
        if self._profiler is None and config.first_step - 1 <= step <= config.last_step:
            self._begin(step)
        yield
        if self._profiler is not None:
            self._last = step
            self._profiler.step()
            if step >= config.last_step:
                self._profiler.stop()
                self._profiler = None

    def close(self) -> None:
        """Ends a profile whose last step was not reached, and writes what was recorded. Idempotent."""
        if self._profiler is not None:
            self._profiler.stop()
            self._profiler = None

    def _begin(self, step: int) -> None:
        config = self._config
        self._first = max(step, config.first_step)
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
        self._profiler = profile(
            activities=activities,
            schedule=schedule(wait=0, warmup=1, active=config.last_step - self._first + 1, repeat=1),
            on_trace_ready=self._write, record_shapes=True, profile_memory=config.memory, with_stack=config.stacks,
        )  # fmt: skip
        self._profiler.start()
        if step >= config.first_step:  # there was no step to warm up in
            self._profiler.step()

    def _write(self, recorded: profile) -> None:
        if self._last < self._first:  # only the step that warms up
            return
        path = self._folder / f"{self._name}-steps-{self._first}-{self._last}.json.gz"
        try:
            make_folder(self._folder)
            recorded.export_chrome_trace(str(path))
            set_access(path)
            log.info("profile of steps %d to %d: %s", self._first, self._last, path)
        except (OSError, RuntimeError) as error:
            log.warning("the profile could not be written: %s", error)
