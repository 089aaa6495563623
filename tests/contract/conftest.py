"""What all tests of contracts share."""

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def _no_communicator_survives() -> Iterator[None]:
    """Leaves what a DeepSpeed trainer joined in this process, also as a single rank. Tests that create several
    trainers, one after the other, do not close them: the first to close would leave for all."""
    yield
    from lockstep.train.distributed import ParallelContext

    ParallelContext().leave()
