"""Whether this host's clock is that of others."""

import ctypes

from lockstep.doctor.check.facts import Clock
from lockstep.doctor.check.system import System, Unavailable, first_line
from lockstep.watch.waiting import WaitTimeout

KERNEL = "the kernel"


def gather_clock(system: System, bound_s: float = 2.0) -> Clock:
    """What chrony says of this host's clock, else systemd, else the kernel, which knows whether anybody steers it.

    Raises:
        Unavailable: nobody says anything.
    """
    silent = []
    for ask in (_chrony, _systemd, _kernel):
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


class _Timex(ctypes.Structure):
    """The beginning of `struct timex` (adjtimex(2)), and room for its rest."""

    _fields_ = (
        ("modes", ctypes.c_uint), ("offset", ctypes.c_long), ("freq", ctypes.c_long), ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long), ("status", ctypes.c_int), ("rest", ctypes.c_long * 32),
    )  # fmt: skip


_UNSYNCHRONISED = 0x0040
"""STA_UNSYNC of sys/timex.h."""


def _kernel(system: System, bound_s: float) -> Clock:
    """Reads, as `modes` of 0 does; containers see the clock of their host."""
    told = _Timex()
    call = getattr(ctypes.CDLL(None), "adjtimex", None)
    if call is None or not (system.proc / "self").exists() or call(ctypes.byref(told)) < 0:
        raise Unavailable("the kernel does not say")
    return Clock(not told.status & _UNSYNCHRONISED, None, KERNEL)
