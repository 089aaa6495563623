"""Marks of tests that need more than Python: network namespaces, or Ray."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks.faults.network_namespaces import why_no_namespaces

TEST_PATHS = [str(Path(__file__).parents[2]), str(Path(__file__).parent)]
"""What pytest has in its path: for programs that import modules of tests."""

needs_namespaces = pytest.mark.skipif(bool(why_no_namespaces()), reason=f"network namespaces: {why_no_namespaces()}")
needs_ray = [pytest.mark.ray, pytest.mark.skipif(find_spec("ray") is None, reason="needs the extra `ray`")]
