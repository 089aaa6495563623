"""The C library's allocator in a worker that computes: it keeps its memory."""

import ctypes
import logging

log = logging.getLogger(__name__)

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # glibc's malloc.h
_KEPT_BYTES = 2**30


def tune_malloc() -> bool:
    """Lets glibc keep what a step frees for the next step: otherwise every large tensor is new pages from the kernel.

    Returns:
        Whether it is done; False where the C library has no `mallopt`.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or not (mallopt(_M_MMAP_THRESHOLD, _KEPT_BYTES) and mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)):
        log.warning("malloc is to be tuned, but this C library's malloc cannot be: left as it is")
        return False
    return True
