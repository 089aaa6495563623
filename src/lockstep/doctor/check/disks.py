"""Space and write speed of the folders that a run writes to, and this host's clock."""

import os
import time
from pathlib import Path

from lockstep.doctor.check.facts import Clock, Disk
from lockstep.doctor.check.limits import filesystem_of
from lockstep.doctor.check.system import System, Unavailable, first_line
from lockstep.watch.waiting import WaitTimeout

WRITE_BYTES = 64 << 20
WRITE_S = 1.0
_BLOCK = bytes(4 << 20)


def gather_disk(system: System, folder: Path, purpose: str, most: int = WRITE_BYTES, bound_s: float = WRITE_S) -> Disk:
    """Space of the folder, or of the nearest one above it that exists, and how fast a file is written there: at most so
    many bytes and about so many seconds. The file is removed."""
    there = folder.absolute()
    while not there.exists():
        there = there.parent
    room = os.statvfs(there)
    kind, _ = filesystem_of(system.proc, there)
    total, free = room.f_blocks * room.f_frsize, room.f_bavail * room.f_frsize
    files = room.f_favail if room.f_files else None
    if room.f_flag & os.ST_RDONLY:
        return Disk(str(folder), purpose, kind, total, free, files, True, problem="the file system is read-only")
    try:
        written, took = _write(there, min(most, free // 4), bound_s)
    except OSError as error:
        return Disk(str(folder), purpose, kind, total, free, files, problem=f"{error.strerror} ({there})")
    return Disk(str(folder), purpose, kind, total, free, files, False, written, round(took, 4))


def _write(folder: Path, most: int, bound_s: float) -> tuple[int, float]:
    """Bytes and seconds, what the disk has to say included (fsync)."""
    path = folder / f".lockstep-check-{os.getpid()}-{time.monotonic_ns()}"
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        begun, written = time.monotonic(), 0
        while written < most and time.monotonic() - begun < bound_s:
            written += os.write(handle, _BLOCK[: min(len(_BLOCK), most - written)])
            os.fdatasync(handle)
        return written, time.monotonic() - begun
    finally:
        os.close(handle)
        path.unlink(missing_ok=True)


def gather_clock(system: System, bound_s: float = 2.0) -> Clock:
    """What chrony says of this host's clock, else systemd.

    Raises:
        Unavailable: neither says anything.
    """
    silent = []
    for ask in (_chrony, _systemd):
        try:
            return ask(system, bound_s)
        except (Unavailable, WaitTimeout, ValueError) as error:
            silent.append(str(error))
    raise Unavailable("; ".join(silent))


def _chrony(system: System, bound_s: float) -> Clock:
    """`chronyc -c tracking`: reference, its name, stratum, time, offset in seconds, ..., leap status last."""
    ran = system.run(["chronyc", "-c", "tracking"], bound_s)
    fields = ran.out.strip().split(",")
    if ran.code or len(fields) < 14:
        raise Unavailable(f"chronyc does not answer ({first_line(ran.err or ran.out)})")
    return Clock(fields[-1] != "Not synchronised" and fields[0] != "00000000", float(fields[4]), "chronyc")


def _systemd(system: System, bound_s: float) -> Clock:
    ran = system.run(["timedatectl", "show", "-p", "NTPSynchronized", "--value"], bound_s)
    said = ran.out.strip()
    if ran.code or said not in ("yes", "no"):
        raise Unavailable(f"timedatectl does not answer ({first_line(ran.err or ran.out)})")
    return Clock(said == "yes", None, "timedatectl")
