"""Shows what is logged, or its warnings, to the user."""

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from lockstep.base.secrets import redact_text, secret_values


class WarningHandler(logging.Handler):
    """Passes the messages of warnings on with secrets hidden, because they quote errors and answers of other hosts.

    Args:
        show: prints a text on a `SafeConsole`.
        level: the lowest level of messages that are passed on.
    """

    def __init__(self, show: Callable[[str], None], level: int = logging.WARNING) -> None:
        super().__init__(level)
        self._show, self._known = show, secret_values(os.environ)

    def emit(self, record: logging.LogRecord) -> None:
        self._show(redact_text(record.getMessage(), self._known))


@contextmanager
def shown_warnings(show: Callable[[str], None]) -> Iterator[None]:
    """Shows what any part of this process warns of meanwhile."""
    handler = WarningHandler(show)
    logging.getLogger().addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)
