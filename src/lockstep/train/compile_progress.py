"""Shows compilation as a stage of the process, `compile`, which makes progress as long as the compiler works.

One graph may take a minute, in which nothing else of the step happens. The CPU time of the process and of the C++
compiler that it starts is the progress.
"""

from functools import cache
from typing import Any

from lockstep.watch.beacon.cpu_progress import CpuProgress
from lockstep.watch.beacon.writer import current_beacon

COMPILE_STAGE = "compile"
GRAPHS, CPU_TIME = "graphs compiled", "compiler CPU ms"
"""Counters of the stage."""


class CompileProgress:
    """Callbacks for the start and the end of each compilation; torch calls them one after the other."""

    def __init__(self) -> None:
        self._stage_before = ""
        self._work = CpuProgress(CPU_TIME)

    def begin(self, *_: Any) -> None:
        """Begins the stage."""
        self._stage_before = current_beacon().stage_name
        current_beacon().stage(COMPILE_STAGE)
        self._work.start()

    def end(self, *_: Any) -> None:
        """Returns to the stage before."""
        self._work.stop()
        current_beacon().add(GRAPHS)
        current_beacon().stage(self._stage_before)


@cache
def show_compilation() -> None:
    """Makes every later compilation of torch.compile in this process a stage. Idempotent."""
    from torch._dynamo.callback import callback_handler

    progress = CompileProgress()
    callback_handler.register_start_callback(progress.begin)
    callback_handler.register_end_callback(progress.end)
