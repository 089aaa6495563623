"""The controller's log: everything in `logs/controller.log`, and on the console what a person must know."""

import contextlib
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lockstep.report.console import Console
from lockstep.run.errors import Interrupted
from lockstep.watch.secrets import redact_text, secret_values

log = logging.getLogger(__name__)


class _File(logging.FileHandler):
    """A log that cannot be written (a full disk, say) must not end the run, nor hide why it ends."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        pass

    def close(self) -> None:
        with contextlib.suppress(OSError):  # it writes what is left, or tries to
            super().close()


class _Redacting(logging.Formatter):
    """Without what looks like a secret, or is one: an error may have it from anywhere."""

    def __init__(self, known: tuple[str, ...]) -> None:
        super().__init__("%(asctime)s controller %(levelname).1s %(name)s: %(message)s")
        self._known = known

    def format(self, record: logging.LogRecord) -> str:
        return redact_text(super().format(record), self._known)


class _Console(logging.Handler):
    def __init__(self, console: Console, known: tuple[str, ...]) -> None:
        super().__init__(logging.WARNING)
        self._console, self._known = console, known

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info is None:  # tracebacks are for the file; whoever ends the run says briefly what happened
            self._console.warning(redact_text(record.getMessage(), self._known))


@contextmanager
def logged(file: Path, console: Console) -> Iterator[None]:
    """Sends what Lockstep logs in this process to both, and what the run fails with to the file, traceback and all."""
    file.parent.mkdir(exist_ok=True)
    to_file = _File(file, delay=True, encoding="utf-8")
    known = secret_values(os.environ)
    to_file.setFormatter(_Redacting(known))
    handlers = (to_file, _Console(console, known))
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
