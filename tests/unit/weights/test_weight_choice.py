"""Which transport a run uses, and what is refused."""

import pytest

from lockstep.weights.choose import Devices, choose, choose_direct


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


@pytest.mark.parametrize(
    ("devices", "engines", "way"),
    [
        (Devices(True, "none"), {"b"}, "nccl"),
        (Devices(True, "none"), {"a"}, "nccl"),
        (Devices(True, "all"), {"a"}, "cuda_ipc"),
        (Devices(True, "all"), {"a", "b"}, None),
        (Devices(True, "none", slower="no NCCL"), {"b"}, None),
        (Devices(False, "none"), {"a"}, None),
        (Devices(True, "some"), {"a"}, None),
        (Devices(True, "none", crowded=True), {"a"}, None),
    ],
    ids=[
        "own-gpus",
        "own-gpus-one-node",
        "shared-gpus",
        "no-rank-there",
        "gloo-fallback",
        "cpu",
        "some-shared",
        "two-engines-on-one",
    ],
)
def test_gpus_are_reached_without_host_memory(devices: Devices, engines: set[str], way: str | None) -> None:
    assert choose_direct("auto", devices, {"a"}, engines).way == way
    for other in ("shared", "gloo", "files"):
        assert choose_direct(other, devices, {"a"}, engines).way is None


@pytest.mark.parametrize(
    ("wanted", "devices", "engines", "problem"),
    [
        ("nccl", Devices(False, "none"), {"a"}, r"nccl goes from GPU to GPU.*cluster\.device.*transport=auto"),
        ("cuda_ipc", Devices(False, "all"), {"a"}, "cuda_ipc goes from GPU to GPU"),
        ("nccl", Devices(True, "all"), {"a"}, "nccl needs a GPU of its own.*cuda_ipc or auto"),
        (
            "cuda_ipc",
            Devices(True, "none"),
            {"a"},
            r"cuda_ipc needs all engines on the trainer.*placement\.colocate=all",
        ),
        ("cuda_ipc", Devices(True, "all"), {"a", "b"}, "cuda_ipc reaches engines.*b has engines and no trainer rank"),
    ],
    ids=["nccl-cpu", "ipc-cpu", "nccl-shared", "ipc-apart", "ipc-other-node"],
)
def test_what_the_devices_do_not_have_is_refused(wanted, devices, engines, problem) -> None:
    with pytest.raises(ValueError, match=rf"weights\.transport {problem}"):
        choose_direct(wanted, devices, {"a"}, engines)


def test_behind_a_direct_way_is_one_through_host_memory() -> None:
    assert choose("nccl", {"a"}, {"a"}, "a").transport == "shared"
    assert choose("cuda_ipc", {"a"}, {"b"}, "a", 2).transport == "gloo"
