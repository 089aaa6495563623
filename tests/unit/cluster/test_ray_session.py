"""Bounded calls to Ray."""

from importlib.util import find_spec

import pytest

if find_spec("ray") is None:
    pytest.skip("needs the extra `ray`", allow_module_level=True)

from ray.exceptions import RayError

from lockstep.cluster.ray.ray_session import RayUnresponsive, ray_call

pytestmark = pytest.mark.ray


def fail(text: str) -> None:
    """Raises one of Ray's errors."""
    raise RayError(text)


@pytest.mark.parametrize(("text", "told"), [("\nthe head is gone\nadvice", "the head is gone"), ("", "RayError")])
def test_a_ray_error_is_reported_in_one_line(text: str, told: str) -> None:
    """Some of Ray's errors have no text."""
    with pytest.raises(RayUnresponsive, match=rf"^Ray call failed \(nodes\): {told}$"):
        ray_call(lambda: fail(text), "nodes")
