"""Python's collector of cycles in a controller that makes tens of thousands of small objects a step."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

AFTER = 50_000
"""Objects made and not freed before it looks for cycles among them; Python's own 700 make it look some hundred times a
step of four thousand completions, for a sixth of the controller's time."""


@contextmanager
def rare_collections() -> Iterator[None]:
    """What there is when a run begins lives as long as it: the collector leaves it alone, and looks at the rest rarely.
    Arrays, and whatever else is in no cycle, are freed at once as ever."""
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(AFTER, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
