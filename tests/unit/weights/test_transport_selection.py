"""Which transport a run uses, and which settings are refused."""

import pytest

from lockstep.weights.weight_transport import DevicePlacement, select_device_transport, select_host_transport


def test_one_host_shares_memory() -> None:
    found = select_host_transport("auto", {"a"}, {"a"}, "a")
    assert (found.transport, found.reason) == ("shared", "engines and trainer are on one node, a")
    assert select_host_transport("gloo", {"a"}, {"a"}, "a").transport == "shared"
    assert "weights.transport is gloo" in select_host_transport("gloo", {"a"}, {"a"}, "a").reason


@pytest.mark.parametrize(
    ("trainers", "engines", "here", "nodes"),
    [({"a"}, {"b"}, "a", 2), ({"a", "b"}, {"b"}, "a", 2), ({"b"}, {"b"}, "a", 2), ({"a"}, {"a"}, "a", 2)],
    ids=["apart", "trainer-on-two", "controller-elsewhere", "others-may-come"],
)
def test_several_nodes_use_gloo(trainers: set[str], engines: set[str], here: str, nodes: int) -> None:
    assert select_host_transport("auto", trainers, engines, here, nodes).transport == "gloo"
    assert select_host_transport("files", trainers, engines, here, nodes).transport == "files"
    with pytest.raises(ValueError, match=r"weights\.transport shared works on one node only"):
        select_host_transport("shared", trainers, engines, here, nodes)


@pytest.mark.parametrize(
    ("devices", "engines", "way"),
    [
        (DevicePlacement(True, "none"), {"b"}, "nccl"),
        (DevicePlacement(True, "none"), {"a"}, "nccl"),
        (DevicePlacement(True, "all"), {"a"}, "cuda_ipc"),
        (DevicePlacement(True, "all"), {"a", "b"}, None),
        (DevicePlacement(True, "none", slower="no NCCL"), {"b"}, None),
        (DevicePlacement(False, "none"), {"a"}, None),
        (DevicePlacement(True, "some"), {"a"}, None),
        (DevicePlacement(True, "none", crowded=True), {"a"}, None),
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
def test_weights_are_sent_from_gpu_to_gpu(devices: DevicePlacement, engines: set[str], way: str | None) -> None:
    assert select_device_transport("auto", devices, {"a"}, engines).way == way
    for other in ("shared", "gloo", "files"):
        assert select_device_transport(other, devices, {"a"}, engines).way is None


@pytest.mark.parametrize(
    ("wanted", "devices", "engines", "problem"),
    [
        (
            "nccl",
            DevicePlacement(False, "none"),
            {"a"},
            r"nccl copies from GPU to GPU.*cluster\.device.*transport=auto",
        ),
        ("cuda_ipc", DevicePlacement(False, "all"), {"a"}, "cuda_ipc copies from GPU to GPU"),
        ("nccl", DevicePlacement(True, "all"), {"a"}, "nccl needs a GPU of its own.*cuda_ipc or auto"),
        (
            "cuda_ipc",
            DevicePlacement(True, "none"),
            {"a"},
            r"cuda_ipc needs all engines on the trainer.*placement\.colocate=all",
        ),
        (
            "cuda_ipc",
            DevicePlacement(True, "all"),
            {"a", "b"},
            "cuda_ipc reaches engines.*b has engines and no trainer rank",
        ),
    ],
    ids=["nccl-cpu", "ipc-cpu", "nccl-shared", "ipc-apart", "ipc-other-node"],
)
def test_transports_that_the_devices_do_not_support_are_refused(wanted, devices, engines, problem) -> None:
    with pytest.raises(ValueError, match=rf"weights\.transport {problem}"):
        select_device_transport(wanted, devices, {"a"}, engines)


def test_with_a_device_transport_there_is_also_a_host_transport() -> None:
    assert select_host_transport("nccl", {"a"}, {"a"}, "a").transport == "shared"
    assert select_host_transport("cuda_ipc", {"a"}, {"b"}, "a", 2).transport == "gloo"
