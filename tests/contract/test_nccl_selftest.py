"""The choice between NCCL and gloo, by real processes with a real store: all ranks make the same choice."""

import json
import multiprocessing
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lockstep.train.collective_backend import (
    NcclTrialResult,
    NcclUnusable,
    choose_backend,
    explain_nccl_failure,
    measure_collectives,
    nccl_trial,
)
from lockstep.train.distributed import join_ranks

TRIAL_S = 2.0


def _fake_trial(kind: str, store: Any, rank: int, world: int) -> None:
    """Replaces the initialisation of NCCL: if it does not fail, ranks wait for each other as in NCCL's rendezvous."""
    if kind == "fails":
        raise RuntimeError("NCCL error: unhandled system error\nand a long trace")
    if kind == "hangs":
        threading.Event().wait(600)
    if kind == "vanishes":
        os._exit(3)
    store.set(f"here/{rank}", b"1")
    if kind != "alone":
        store.wait([f"here/{other}" for other in range(world)])


def _rank(folder: Path, port: int, rank: int, kinds: list[str], fallback: str) -> None:
    store = dist.PrefixStore("trial", dist.TCPStore("127.0.0.1", port, is_master=False))
    world = len(kinds)
    result: dict[str, Any] = {}
    try:
        backend, why = choose_backend(
            store,
            rank,
            world,
            lambda: _fake_trial(kinds[rank], store.clone(), rank, world),
            fallback,
            TRIAL_S,  # type: ignore[arg-type]
        )
        result = {"backend": backend, "why": why}
        if backend == "gloo":
            ranks = join_ranks(rank, world, torch.device("cpu"), f"tcp://127.0.0.1:{port}", "gen1/policy/0", 60)
            assert ranks.group is not None
            cost = measure_collectives(ranks.group, world, torch.device("cpu"), 60)
            result |= {"latency": cost.latency_ms, "rate": cost.megabytes_per_s, "text": str(cost)}
            ranks.leave()
    except NcclUnusable as error:
        result = {"error": str(error), "words": [result.error for result in error.results]}
    (folder / f"{rank}.json").write_text(json.dumps(result))


def decided(folder: Path, kinds: list[str], fallback: str = "gloo") -> list[dict[str, Any]]:
    """The result of each rank; empty for a rank that ended."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("fork")
    processes = [
        context.Process(target=_rank, args=(folder, store.port, rank, kinds, fallback), daemon=True)
        for rank in range(len(kinds))
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    paths = [folder / f"{rank}.json" for rank in range(len(kinds))]
    return [json.loads(path.read_text()) for path in paths if path.exists()]


@pytest.mark.parametrize(
    "kinds", [["good", "fails"], ["fails", "good"], ["alone", "hangs"]], ids=["second", "first", "hangs"]
)
def test_one_failing_rank_moves_all_to_gloo_with_the_finding_and_the_cost(tmp_path: Path, kinds: list[str]) -> None:
    first, second = decided(tmp_path, kinds)
    assert first["backend"] == second["backend"] == "gloo"
    assert first["why"] == second["why"], "one decision"
    bad = next(rank for rank, kind in enumerate(kinds) if kind in ("fails", "hangs"))
    cause = "unhandled system error" if "fails" in kinds else "did not come up within 2 s"
    assert f"rank {bad} (" in first["why"] and cause in first["why"] and "NCCL_DEBUG=INFO" in first["why"]
    assert f"rank {1 - bad} (" not in first["why"], "a rank that only waited for the other is no cause"
    assert set(first["latency"]) == {"all_reduce", "all_gather"} and min(first["rate"].values()) > 0
    assert "MB/s" in first["text"]


def test_without_a_fallback_all_ranks_end_with_the_finding(tmp_path: Path) -> None:
    found = decided(tmp_path, ["good", "fails"], "none")
    assert len(found) == 2 and all("communication.fallback=gloo" in each["error"] for each in found)
    assert found[0]["words"] == found[1]["words"]


def test_nccl_is_used_if_it_works_on_all_ranks(tmp_path: Path) -> None:
    assert decided(tmp_path, ["good", "good"]) == [{"backend": "nccl", "why": ""}] * 2


@pytest.mark.slow
def test_a_rank_that_ends_before_its_result_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.train.collective_backend.TRIAL_MARGIN_S", 2.0)
    (only,) = decided(tmp_path, ["alone", "vanishes"], "none")
    assert "rank 1 (host not known): no result within" in only["error"]
    assert "that rank ended or was never started" in only["error"].lower()


def test_the_finding_names_causes_before_ranks_that_waited() -> None:
    waited = "it did not come up within 90 s"
    words = [
        NcclTrialResult(0, "a", waited),
        NcclTrialResult(1, "b", "DistBackendError: Duplicate GPU detected"),
        NcclTrialResult(2, "a", waited),
    ]
    text = explain_nccl_failure(words)
    assert "3 of 3 ranks: rank 1 (b): DistBackendError: Duplicate GPU detected." in text
    assert "Two ranks share a GPU" in text
    assert "rank 0 (a); rank 2 (a)" not in text
    all_waited = explain_nccl_failure([NcclTrialResult(rank, "a", waited) for rank in range(5)])
    assert "and 2 more" in all_waited and "NCCL_SOCKET_IFNAME" in all_waited


@pytest.mark.skipif(dist.is_nccl_available(), reason="this torch has NCCL")
def test_a_torch_without_nccl_says_so() -> None:
    with pytest.raises(RuntimeError, match="this torch has no NCCL"):
        nccl_trial(dist.HashStore(), 0, 1, torch.device("cpu"))
