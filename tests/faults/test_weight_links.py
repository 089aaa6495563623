"""Weights between two network namespaces, as between hosts: over the address of the link, and when the link is cut."""

import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from needed_systems import needs_namespaces
from torch._C._distributed_c10d import TCPStore

from benchmarks.faults.network_namespaces import Cable

sys.path.insert(0, str(Path(__file__).parents[1] / "contract"))
from weight_nodes import NodeSet

pytestmark = needs_namespaces


@pytest.fixture
def cable() -> Iterator[Cable]:
    with Cable.any("lh", "10.81") as made:
        yield made


def test_a_link_that_is_cut_in_the_middle_of_a_transfer(tmp_path: Path, cable: Cable) -> None:
    store = TCPStore(cable.here, 0, None, True, timedelta(seconds=60), wait_for_workers=False)
    node_set = NodeSet(
        tmp_path / "run", "gloo", ["a"], ["b", "a"], limit_s=3.0, bucket_bytes=20_000,
        addresses={"a": cable.here, "b": cable.there}, spaces={"b": cable.name}, store=f"tcp://{cable.here}:{store.port}",
    )  # fmt: skip
    try:
        node_set.prepare_stores()
        node_set.start()
        node_set.check(0)
        began = time.monotonic()
        assert node_set.interrupt_publish("b", 1, lambda _: cable.cut()) == [False, True]
        assert time.monotonic() - began < 30
        node_set.check(1, 1)
        cable.mend()
        node_set.fetch(0, 1)
        node_set.check(1)
        assert node_set.publish(2) == [True, True]
    finally:
        node_set.close()
