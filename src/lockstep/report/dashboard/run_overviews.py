"""The list of runs of a dashboard: overviews are read together, and a folder that does not answer holds up no other."""

import asyncio
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from lockstep.ledger.errors import LedgerError
from lockstep.report.dashboard.run_catalogue import RunCatalogue
from lockstep.report.dashboard.run_feed import UNREADABLE, RunBusy, RunOverview
from lockstep.report.dashboard.shown_run import ShownRun

LOOKS_AT_ONCE = 8
"""Of the threads of the pool, so that some are left for other requests while folders hang."""
ANSWER_S = 3.0
"""A list waits so long for a run while no other one answers."""


@dataclass(frozen=True, slots=True)
class _Look:
    """The reading of an overview. A folder that hangs is not looked at again meanwhile."""

    future: Future[RunOverview]
    began: float


class RunOverviews:
    """Reads the overviews of all runs of a catalogue. To be used in one event loop at a time.

    Args:
        threads: where to read. Folders that hang keep at most `LOOKS_AT_ONCE` of them.
    """

    def __init__(self, catalogue: RunCatalogue, threads: ThreadPoolExecutor) -> None:
        self._catalogue, self._threads = catalogue, threads
        self._listing: Future[dict[str, ShownRun]] | None = None
        self._shown: dict[str, ShownRun] = {}
        self._looks: dict[str, _Look] = {}
        self._known: dict[str, RunOverview] = {}
        """The newest overviews."""
        self._unreadable: set[str] = set()
        """The runs whose last look failed."""

    async def read(self) -> list[dict[str, Any]]:
        """Returns the overviews in the order of the catalogue: of a run that does not answer the one before, or one of
        an unknown state. A run that was removed meanwhile, or is no run after all, is left out."""
        if self._listing is None or self._listing.done():
            self._listing = self._threads.submit(self._catalogue.runs)
        await asyncio.wait([asyncio.wrap_future(self._listing)], timeout=ANSWER_S)
        if self._listing.done():
            self._shown = self._listing.result(0)
        runs = self._shown  # of this list: another one may be asked for meanwhile
        await self._look_at(runs)
        return [
            {"id": name, "folder": str(shown.folder), **asdict(self._known.get(name) or _unknown(shown))}
            for name, shown in runs.items()
            if name not in self._unreadable
        ]

    async def _look_at(self, runs: Mapping[str, ShownRun]) -> None:
        """Looks at runs, a few at a time, until all have answered or none of them does."""
        self._take_answers()
        left, awaited = dict(runs), dict[str, asyncio.Future[RunOverview]]()
        while left:
            for name, shown in [each for each in left.items() if each[0] not in awaited]:
                look = self._looks.get(name) or self._begin(name, shown)
                if look is not None and look.began > time.monotonic() - ANSWER_S:
                    awaited[name] = asyncio.wrap_future(look.future)
                elif look is not None:
                    del left[name]  # an earlier list has waited for it
            if not awaited:  # only folders that hang are looked at
                break
            answered, _ = await asyncio.wait(awaited.values(), timeout=ANSWER_S, return_when=asyncio.FIRST_COMPLETED)
            self._take_answers()
            for name in [each for each, future in awaited.items() if future.done()]:
                del left[name], awaited[name]
            if not answered:
                break

    def _begin(self, name: str, shown: ShownRun) -> _Look | None:
        """Begins to look at a run, unless as many are looked at as may be."""
        if len(self._looks) >= LOOKS_AT_ONCE:
            return None
        self._looks[name] = _Look(self._threads.submit(shown.feed.overview), time.monotonic())
        return self._looks[name]

    def _take_answers(self) -> None:
        for name, look in list(self._looks.items()):
            if not look.future.done():
                continue
            del self._looks[name]
            try:
                self._known[name] = look.future.result(0)
                self._unreadable.discard(name)
            except (LedgerError, *UNREADABLE, OSError):
                self._unreadable.add(name)
            except RunBusy:  # it is read for another request: what is known holds
                self._unreadable.discard(name)


def _unknown(shown: ShownRun) -> RunOverview:
    return RunOverview(shown.folder.name, "", "unknown", 0, None, None, None, "its folder has not answered yet")
