"""Shows warnings of the log to the user."""

import logging
import os
from collections.abc import Callable

from lockstep.base.secrets import redact_text, secret_values


class WarningHandler(logging.Handler):
    """Passes the messages of warnings on with secrets hidden, because they quote errors and answers of other hosts.

    Args:
        show: prints a text on a `SafeConsole`.
    """

    def __init__(self, show: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._show, self._known = show, secret_values(os.environ)

    def emit(self, record: logging.LogRecord) -> None:
        self._show(redact_text(record.getMessage(), self._known))
