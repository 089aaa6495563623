"""Questions to Ray, and what comes of those that it does not answer."""

from importlib.util import find_spec

import pytest

if find_spec("ray") is None:
    pytest.skip("needs the extra `ray`", allow_module_level=True)

from ray.exceptions import RayError

from lockstep.cluster.ray.ray_session import RayUnresponsive, ray_call

pytestmark = pytest.mark.ray


def fail(text: str) -> None:
    """As a call of Ray does."""
    raise RayError(text)


@pytest.mark.parametrize(("text", "told"), [("\nthe head is gone\nadvice", "the head is gone"), ("", "RayError")])
def test_an_error_of_rays_is_told_in_a_line(text: str, told: str) -> None:
    """Also one that has no text, as some of Ray's have."""
    with pytest.raises(RayUnresponsive, match=rf"^Ray call failed \(nodes\): {told}$"):
        ray_call(lambda: fail(text), "nodes")
