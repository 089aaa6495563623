"""Which transport a run uses, and what is refused."""

import pytest

from lockstep.weights.choose import choose


def test_one_host_shares_memory() -> None:
    found = choose("auto", {"a"}, {"a"}, "a")
    assert (found.transport, found.reason) == ("shared", "engines and trainer are on one node, a")
    assert choose("gloo", {"a"}, {"a"}, "a").transport == "shared"
    assert "weights.transport is gloo" in choose("gloo", {"a"}, {"a"}, "a").reason


@pytest.mark.parametrize(
    ("trainers", "engines", "here", "nodes"),
    [({"a"}, {"b"}, "a", 2), ({"a", "b"}, {"b"}, "a", 2), ({"b"}, {"b"}, "a", 2), ({"a"}, {"a"}, "a", 2)],
    ids=["apart", "trainer-on-two", "controller-elsewhere", "others-may-come"],
)
def test_several_nodes_use_gloo(trainers: set[str], engines: set[str], here: str, nodes: int) -> None:
    assert choose("auto", trainers, engines, here, nodes).transport == "gloo"
    assert choose("files", trainers, engines, here, nodes).transport == "files"
    with pytest.raises(ValueError, match=r"weights\.transport shared reaches one node"):
        choose("shared", trainers, engines, here, nodes)
