"""The runs that a dashboard shows: those named on its command line, and those in the folders named there."""

import hashlib
import os
import threading
from collections.abc import Sequence
from pathlib import Path

from lockstep.base.errors import PicklableError
from lockstep.ledger.run_folder import INDEX_FILE
from lockstep.report.dashboard.shown_run import ShownRun

MOST_RUNS = 1000
"""Runs of all folders together; the rest is left out."""
METRIC_BYTES = 512 << 20
"""Of the metrics of all runs in memory."""
_ID_CHARS = 12


class NothingToShow(PicklableError, ValueError):
    """A path on the command line is neither the folder of a run nor one that can hold such folders."""

    def __init__(self, path: Path, problem: str) -> None:
        super().__init__(f"RUN {path}: {problem}: give the folder of a run, or a folder that holds run folders")
        self.path, self.problem = path, problem


class RunCatalogue:
    """Finds runs again at each look, so that new ones appear; each keeps its id while this process lives.

    Raises:
        NothingToShow: a path cannot be shown.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = [_checked(path) for path in paths]
        self._runs: dict[str, ShownRun] = {}
        self._used: dict[ShownRun, None] = {}
        """Those that were asked for, the latest last."""
        self._lock = threading.Lock()

    def runs(self) -> dict[str, ShownRun]:
        """All runs by id, in the order of the command line, those of one folder by name."""
        folders = self._folders()  # not under the lock: a file system may not answer
        with self._lock:
            found = {}
            for folder in folders:
                name = hashlib.sha256(os.fsencode(folder)).hexdigest()[:_ID_CHARS]
                found[name] = self._runs.get(name) or ShownRun(folder)
            self._runs = found
            return dict(found)

    def run(self, run: str) -> ShownRun | None:
        """The run with this id, which may have been removed meanwhile; None if there never was one. The metrics of runs
        that nobody has asked for since are dropped when those of all runs take too much memory."""
        found = self._runs.get(run) or self.runs().get(run)
        if found is not None:
            with self._lock:
                self._used.pop(found, None)
                self._used[found] = None
                self._drop_oldest()
        return found

    def _drop_oldest(self) -> None:
        sizes = {each: each.feed.size for each in self._used}
        left = sum(sizes.values())
        for each in list(self._used)[:-1]:
            if left <= METRIC_BYTES:
                break
            each.feed.forget()
            left -= sizes[each]
            del self._used[each]

    def close(self) -> None:
        """Ends the watching of all runs."""
        for each in self._runs.values():
            each.live.close()

    def _folders(self) -> list[Path]:
        found: dict[Path, None] = {}
        for path in self._paths:
            if (path / INDEX_FILE).is_file():
                found[path] = None
                continue
            try:
                inside = sorted(each for each in path.iterdir() if not each.name.startswith("."))
            except OSError:  # removed meanwhile
                continue
            found.update(dict.fromkeys(each for each in inside if (each / INDEX_FILE).is_file()))
        return list(found)[:MOST_RUNS]


def _checked(path: Path) -> Path:
    path = path.expanduser().absolute()
    if not path.exists():
        raise NothingToShow(path, "there is no such folder")
    if not path.is_dir():
        raise NothingToShow(path, "is not a folder")
    if not os.access(path, os.R_OK | os.X_OK):
        raise NothingToShow(path, "this user may not read it")
    return path
