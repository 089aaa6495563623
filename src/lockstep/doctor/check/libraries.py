"""NCCL and CUDA's forward compatibility where images bring them as files and not as packages. Nothing is loaded."""

import mmap
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

FOLDERS = tuple(
    Path(folder)
    for folder in (
        "/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/lib", "/usr/local/lib",
        "/usr/local/nccl/lib", "/usr/local/cuda/lib64",
    )
)  # fmt: skip
"""Where the loader of Linux finds libraries of distributions and of NVIDIA's images."""
COMPAT = (Path("/usr/local/cuda/compat/lib"), Path("/usr/local/cuda/compat"))
"""Where the package cuda-compat puts the driver's library of a newer release."""
_SAID = b"NCCL version 2."


def nccl_of_system(environ: Mapping[str, str], folders: Sequence[Path] = FOLDERS) -> str | None:
    """The version of the libnccl.so.2 that a torch without NCCL's package would load; None where there is none."""
    for folder in (*_asked_for(environ), *folders):
        file = folder / "libnccl.so.2"
        if file.is_file():
            named = re.search(r"\.so\.(\d+\.\d+\.\d+)", file.resolve().name)
            return named[1] if named else _said(file)
    return None


def compat(environ: Mapping[str, str], folders: Sequence[Path] = COMPAT) -> tuple[str, bool]:
    """The folder of a driver's library for forward compatibility, and whether the loader is told of it; empty where
    there is none."""
    asked = list(_asked_for(environ))
    for folder in (*(each for each in asked if "compat" in each.parts), *folders):
        if (folder / "libcuda.so.1").exists():
            return str(folder), folder in asked
    return "", False


def _asked_for(environ: Mapping[str, str]) -> Iterator[Path]:
    return (Path(part) for part in environ.get("LD_LIBRARY_PATH", "").split(":") if part)


def _said(file: Path) -> str | None:
    try:
        with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
            at = content.find(_SAID)
            begin = content[at : at + 40].decode(errors="replace") if at >= 0 else ""
    except (OSError, ValueError):
        return None
    found = re.match(r"NCCL version (\d+\.\d+\.\d+)", begin)
    return found[1] if found else None
