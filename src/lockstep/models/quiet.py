"""transformers keeps quiet while Lockstep loads and saves."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from transformers.utils import logging


@contextmanager
def quiet() -> Iterator[None]:
    """Without transformers' progress bars (a log is no terminal) and without its advice, which is about code that the
    user did not write. `TRANSFORMERS_VERBOSITY` in the environment brings the advice back. Also a decorator.

    Not around downloads: their bars are progress that somebody waits for.
    """
    bars, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    if "TRANSFORMERS_VERBOSITY" not in os.environ:
        logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
