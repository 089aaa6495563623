"""How a run ends: exported, summarised and said, whatever the reason."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

from lockstep.ledger.errors import LedgerError
from lockstep.run.errors import Interrupted
from lockstep.run.run import Run
from lockstep.watch.errors import first_line
from lockstep.watch.secrets import redact_text, secret_values

log = logging.getLogger(__name__)


@contextmanager
def finished(run: Run) -> Iterator[None]:
    """Around a recipe: exports the model when it came to its end, and tells how it ended in any case."""
    try:
        yield
        for name in run.config.exports:
            run.export(name)
    except (Interrupted, KeyboardInterrupt):
        _tell(run, "interrupted")
        raise
    except BaseException as error:
        _tell(run, f"failed: {type(error).__name__}: {first_line(error)}")
        raise
    _tell(run, "finished")


def _tell(run: Run, reason: str) -> None:
    reason = redact_text(reason, secret_values(os.environ))
    try:
        run.recovery.flush()
        run.ledger.event("end", reason=reason, steps=run.ledger.done())
        run.monitor.finish(reason)
    except (LedgerError, OSError) as error:
        # The disk may be what ended the run: the first error is the one to raise, not this one.
        log.warning("summary and report could not be written: %s", error)
