"""The files of the page. A name from an address is only compared with theirs: no path from outside reaches the disk."""

from importlib.resources import files
from pathlib import Path

_TYPES = {
    ".html": "text/html; charset=utf-8", ".js": "text/javascript; charset=utf-8", ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml", ".png": "image/png", ".ico": "image/x-icon", ".woff2": "font/woff2",
}  # fmt: skip
STATIC = Path(str(files("lockstep.report.dashboard") / "static"))


def static_file(name: str) -> tuple[bytes, str] | None:
    """The content and the type of a file of the page, such as `index.html`; None if there is none of this name."""
    known = {path.relative_to(STATIC).as_posix(): path for path in STATIC.rglob("*") if path.suffix in _TYPES}
    path = known.get(name)
    return None if path is None else (path.read_bytes(), _TYPES[path.suffix])
