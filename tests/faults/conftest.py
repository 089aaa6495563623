"""What all tests of faults share."""

import sys
from collections.abc import Iterator

import psutil
import pytest


@pytest.fixture(autouse=True)
def _no_watched_job_survives() -> Iterator[None]:
    """Ends the commands `lockstep watch` that a failed test leaves, with the jobs that they watch."""
    yield
    commands = sys.modules.get("test_watch_command")
    for process in getattr(commands, "STARTED", []):
        if process.poll() is None:
            for each in [*psutil.Process(process.pid).children(recursive=True), process]:
                each.kill()
            process.communicate(timeout=10)
    getattr(commands, "STARTED", []).clear()
