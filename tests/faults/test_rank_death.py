"""A rank that dies in the middle of a collective is reported as the cause, whichever error arrives first."""

import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from rank_services import Ring

from lockstep.cluster.local_cluster import LocalCluster
from lockstep.cluster.protocol import Worker, WorkerDied, WorkerSpec
from lockstep.cluster.rpc.futures import gather_results
from lockstep.config.cluster import LocalClusterConfig as Config

HERE = str(Path(__file__).parent)


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[list[Worker]]:
    with LocalCluster(Config(), f"ranks-{secrets.token_hex(3)}", tmp_path, 1) as cluster:
        environment = {"PYTHONPATH": os.pathsep.join([HERE, os.environ.get("PYTHONPATH", "")]), "OMP_NUM_THREADS": "1"}
        yield cluster.start(
            [
                WorkerSpec(
                    f"rank-{rank}", "policy", rank, "rank_services:Ring",
                    {"rank": rank, "world": 2, "store": cluster.store()}, environment, ("torch", "psutil"),
                )
                for rank in range(2)
            ]
        )  # fmt: skip


def test_the_dead_rank_is_named_and_not_its_victim(ranks: list[Worker]) -> None:
    assert gather_results([rank.submit(Ring.meet, 3) for rank in ranks], "a sum") == [8.0, 8.0]
    for rank in ranks:
        assert set(rank.call(Ring.listens)) <= {"127.0.0.1", "::1"}
    began = time.monotonic()
    with pytest.raises(WorkerDied) as caught:
        gather_results([rank.submit(Ring.meet, 40, leaves=1) for rank in ranks], "a sum")
    assert (caught.value.worker, caught.value.exit_code) == ("rank-1", 3)
    assert time.monotonic() - began < 10
