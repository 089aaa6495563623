"""Tunes glibc's malloc for programs that free and allocate the same large tensors in every step."""

import ctypes
import logging

log = logging.getLogger(__name__)

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # glibc's malloc.h
_RETAINED_BYTES = 2**30


def tune_malloc() -> bool:
    """Makes glibc keep freed memory for the next step. Otherwise every large tensor needs new pages from the kernel.

    Returns:
        Whether malloc was tuned; False if the C library has no `mallopt`.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or not (
        mallopt(_M_MMAP_THRESHOLD, _RETAINED_BYTES) and mallopt(_M_TRIM_THRESHOLD, _RETAINED_BYTES)
    ):
        log.warning("trainer.malloc is tuned, but this C library has no mallopt: malloc keeps its defaults")
        return False
    return True
