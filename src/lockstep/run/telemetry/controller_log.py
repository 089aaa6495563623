"""The controller's log: everything goes to `logs/controller.log`, warnings to the console."""

import contextlib
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lockstep.base.secrets import redact_text, secret_values
from lockstep.report.live_console import LiveConsole
from lockstep.run.errors import Interrupted

log = logging.getLogger(__name__)


class _LogFile(logging.FileHandler):
    """A log that cannot be written, as on a full disk, must neither end the run nor hide why it ended."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        pass

    def close(self) -> None:
        with contextlib.suppress(OSError):  # closing flushes
            super().close()


class _RedactingFormatter(logging.Formatter):
    """Redacts secrets, and what looks like one: an error message may contain any."""

    def __init__(self, known: tuple[str, ...]) -> None:
        super().__init__("%(asctime)s controller %(levelname).1s %(name)s: %(message)s")
        self._known = known

    def format(self, record: logging.LogRecord) -> str:
        return redact_text(super().format(record), self._known)


class _ConsoleHandler(logging.Handler):
    def __init__(self, console: LiveConsole, known: tuple[str, ...]) -> None:
        super().__init__(logging.WARNING)
        self._console, self._known = console, known

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info is None:  # tracebacks go to the file; the command prints a short message
            self._console.warning(redact_text(record.getMessage(), self._known))


@contextmanager
def controller_logging(file: Path, console: LiveConsole) -> Iterator[None]:
    """Sends the log of this process to the file and its warnings to the console; the file also gets the final error."""
    file.parent.mkdir(exist_ok=True)
    to_file = _LogFile(file, delay=True, encoding="utf-8")
    known = secret_values(os.environ)
    to_file.setFormatter(_RedactingFormatter(known))
    handlers = (to_file, _ConsoleHandler(console, known))
    logger = logging.getLogger("lockstep")
    level = logger.level
    logger.setLevel(logging.INFO)
    for handler in handlers:
        logger.addHandler(handler)
    try:
        yield
    except (Interrupted, KeyboardInterrupt):
        raise
    except BaseException:
        log.exception("the run failed")
        raise
    finally:
        for handler in handlers:
            logger.removeHandler(handler)
            handler.close()
        logger.setLevel(level)
