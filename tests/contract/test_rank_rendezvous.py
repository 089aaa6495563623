"""The rendezvous of real processes at a real store, some of which never join."""

import json
import logging
import multiprocessing
import threading
import time
from collections.abc import Iterator
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lockstep.base.folders import new_run_id
from lockstep.cluster.rendezvous_store import RendezvousStoreProcess, open_store
from lockstep.train import distributed
from lockstep.train.distributed import RanksMissing, wait_for_ranks
from lockstep.watch.beacon.writer import close_beacon, current_beacon, open_beacon

NAMES = ["policy-0 on node-a", "policy-1 on node-a", "policy-2 on node-b"]
BOUND_S = 5.0


def _rank(folder: Path, store: str, rank: int, imported: Barrier) -> None:
    logging.basicConfig(filename=folder / f"{rank}.log", level=logging.INFO)
    distributed.RENDEZVOUS_S = BOUND_S
    imported.wait(120)
    try:
        distributed.join_ranks(rank, len(NAMES), torch.device("cpu"), store, "gen1/policy/0", 60, names=NAMES)
        result = {"missing": []}
    except RanksMissing as error:
        result = {"missing": list(error.missing), "text": str(error)}
    (folder / f"{rank}.json").write_text(json.dumps(result))


@pytest.fixture
def store(tmp_path: Path, kind: str) -> Iterator[str]:
    """The URL of a store as a run on one host (`file`) or on several (`tcp`) has it."""
    if kind == "file":
        (tmp_path / "store").mkdir()
        yield (tmp_path / "store").as_uri()
        return
    made = RendezvousStoreProcess("127.0.0.1", None, tmp_path)
    try:
        url = made.serve()
        open_store(url, "test", 120.0)  # the bound of the ranks is too short for its process to import torch
        yield url
    finally:
        made.close()


@pytest.mark.parametrize(
    ("coming", "kind"),
    [
        pytest.param((0, 1), "tcp", id="without-2-tcp"),
        pytest.param((1, 2), "file", id="without-0-file"),
        *(
            pytest.param(coming, kind, id=f"{name}-{kind}", marks=pytest.mark.slow)
            for name, coming, kind in (
                ("without-2", (0, 1), "file"), ("without-0", (1, 2), "tcp"), ("all", (0, 1, 2), "file"),
                ("all", (0, 1, 2), "tcp"),
            )
        ),
    ],
)  # fmt: skip
def test_missing_ranks_are_named_by_every_rank_that_joined(tmp_path: Path, store: str, coming: tuple[int, ...]) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "transformers", "lockstep.train.trainer_service"])
    imported = context.Barrier(len(coming))
    ranks = [context.Process(target=_rank, args=(tmp_path, store, rank, imported), daemon=True) for rank in coming]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join(120)
    missing = [name for rank, name in enumerate(NAMES) if rank not in coming]
    for rank in coming:
        result = json.loads((tmp_path / f"{rank}.json").read_text())
        assert result["missing"] == missing
        if missing:
            assert f"{missing[0]} of 3 ranks did not join" in result["text"]
    if coming == (0, 1):
        lines = (tmp_path / "0.log").read_text().splitlines()
        assert len([line for line in lines if "2 of 3 ranks have joined, missing: policy-2 on node-b" in line]) >= 2


def test_the_wait_names_the_missing_ranks(tmp_path: Path) -> None:
    """By the names of their processes, which the console and the supervisor show."""
    thread_ids: list[str] = []

    def rank_0() -> None:
        thread_ids.append(str(threading.get_native_id()))
        wait_for_ranks(store, 0, 3, NAMES, 120.0)

    store = dist.HashStore()
    thread = threading.Thread(target=rank_0, daemon=True)

    def until(waits_for: str) -> None:
        deadline = time.monotonic() + 60
        while True:
            wait = current_beacon().innermost_wait(int(thread_ids[0])) if thread_ids else None
            if wait is not None and wait.waits_for == waits_for and wait.kind == "rendezvous":
                return
            assert time.monotonic() < deadline, wait
            time.sleep(0.01)

    open_beacon(new_run_id("meets"), "policy-0", "policy", 0)
    thread.start()
    try:
        until("policy-1, policy-2")
        store.set("joined/1", "{}")
        until("policy-2")
        store.set("joined/2", "{}")
        thread.join(30)
    finally:
        close_beacon()
    assert json.loads(store.get("over")) == []
