"""Whether a process still has the code that is on disk."""

import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path


def changed_since(wall: float) -> str | None:
    """A file that this process has imported and that was written after `wall` (seconds since the epoch), or the folder
    of installed packages where one came or went since; None where all is as it was. Whoever has imported it before has
    older code then."""
    modules = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
    packages = [sysconfig.get_paths()[name] for name in ("purelib", "platlib")]
    return next((file for file in _distinct([*modules, *packages]) if _written(file) > wall), None)


def _distinct(files: Iterable[object]) -> Iterable[str]:
    return dict.fromkeys(file for file in files if isinstance(file, str))


def _written(file: str) -> float:
    try:
        return Path(file).stat().st_mtime
    except OSError:  # removed since, or never a file: a module in an archive
        return 0.0
