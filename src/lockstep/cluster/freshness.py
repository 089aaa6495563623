"""Whether a process still has the code that is on disk."""

import sys
import sysconfig
from collections.abc import Iterable, Sequence
from pathlib import Path


def changed_since(wall: float, more: Iterable[str] = ()) -> str | None:
    """A file that this process has imported, or one of `more`, that was written after `wall` (seconds since the epoch),
    or the folder of installed packages where one came or went since; None where all is as it was. Whoever has imported
    it before has older code then."""
    packages = [sysconfig.get_paths()[name] for name in ("purelib", "platlib")]
    return next((file for file in _distinct([*_imported(), *packages, *more]) if _written(file) > wall), None)


def imported() -> list[tuple[str, str]]:
    """The files that this process has imported, for `found` on another host: each with its path relative to where it
    was imported from. But for installed packages and Python's own library, of which the folder tells, and which would
    be too many to be sent along with a question."""
    roots = sorted({str(Path(root).absolute()) for root in sys.path}, key=len, reverse=True)
    installed = tuple(f"{path}/" for path in sysconfig.get_paths().values())
    own = (file for file in _distinct(_imported()) if not file.startswith(installed))
    return [(file, _relative(file, roots)) for file in own]


def found(files: Iterable[tuple[str, str]]) -> list[str]:
    """Those of `imported` that are on this host: where this process would import them from, or else at the same
    path."""
    roots = [Path(root).absolute() for root in sys.path]
    places = [[*(root / relative for root in roots), Path(file)] for file, relative in files]
    there = (next((place for place in candidates if place.is_file()), None) for candidates in places)
    return [str(place) for place in there if place is not None]


def _relative(file: str, roots: Sequence[str]) -> str:
    root = next((root for root in roots if file.startswith(f"{root}/")), None)
    return file if root is None else file.removeprefix(f"{root}/")


def _imported() -> Iterable[object]:
    return [getattr(module, "__file__", None) for module in list(sys.modules.values())]


def _distinct(files: Iterable[object]) -> Iterable[str]:
    return dict.fromkeys(file for file in files if isinstance(file, str))


def _written(file: str) -> float:
    try:
        return Path(file).stat().st_mtime
    except OSError:  # removed since, or never a file: a module in an archive
        return 0.0
