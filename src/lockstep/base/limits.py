"""Limits of this process: how many descriptors it may have open."""

import contextlib
import resource

MAX_DESCRIPTORS = 1 << 20
"""The limit is raised no further: programs that close every possible descriptor take long with a billion of them."""


def raise_descriptor_limit() -> int:
    """Raises the soft limit of open descriptors, often 1024, to the hard limit. Returns the limit. Child processes
    inherit it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return MAX_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft
    with contextlib.suppress(OSError, ValueError):  # a sandbox may forbid it
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        return wanted
    return soft
