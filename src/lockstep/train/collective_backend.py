"""Selects NCCL or gloo for all ranks of a trainer: every rank tries NCCL, and rank 0 decides for all.

Each rank tries one small all-reduce on a temporary NCCL communicator, for a limited time, and writes the result into
the store. Rank 0 reads all results and writes the decision, which the others adopt, so that all ranks use the same
backend. The decision goes through the store because a collective could hang on some of the ranks.
"""

import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from lockstep.base import waits
from lockstep.base.wait_state import WaitTimeout

log = logging.getLogger(__name__)

NCCL_TRIAL_S = 90.0
"""Time limit of a rank's trial: NCCL needs seconds on one host, and tens of seconds on hundreds of hosts."""
TRIAL_MARGIN_S = 30.0
"""The first and the last rank begin their trials at most this far apart."""
LATENCY_ELEMENTS, BANDWIDTH_ELEMENTS = 1024, 1 << 22
"""Number of float32 elements in the collectives that measure latency and bandwidth."""
MEASURED_ROUNDS = 5

_FAILED_KEY = "failed"

CollectiveBackend = Literal["nccl", "gloo"]
BackendFallback = Literal["none", "gloo"]

NCCL_ADVICE = (
    ("has no NCCL", "install a CUDA build of torch"),
    ("Duplicate GPU", "two ranks share a GPU, which NCCL refuses: use as many GPUs as trainer.ranks"),
    ("no result", "that rank ended or was never started: see its log"),
    ("did not come up", "a network interface or a link between GPUs does not work: check NCCL_SOCKET_IFNAME and "
     "firewalls between the hosts, and try NCCL_IB_DISABLE=1 and NCCL_P2P_DISABLE=1 one at a time"),
    ("unhandled system error", "a system call failed: check NCCL_SOCKET_IFNAME, the size of /dev/shm and memlock"),
    ("unhandled cuda error", "the driver must support the CUDA of torch: compare nvidia-smi with torch.version.cuda"),
)  # fmt: skip
"""(part of an error's message, its fix)."""


@dataclass(frozen=True, slots=True)
class NcclTrialResult:
    """The result of one rank's attempt to use NCCL."""

    rank: int
    host: str
    error: str
    """Empty if NCCL works."""


@dataclass(frozen=True, slots=True)
class CollectiveCost:
    """Measured cost of collectives among all ranks."""

    latency_ms: dict[str, float]
    """Latency of 4 KiB by operation."""
    megabytes_per_s: dict[str, float]
    """Bandwidth at 16 MiB by operation, in bytes of one rank's input."""

    def __str__(self) -> str:
        return ", ".join(
            f"{name} {self.latency_ms[name]:.2f} ms and {self.megabytes_per_s[name]:,.0f} MB/s"
            for name in self.latency_ms
        )


class NcclUnusable(RuntimeError):
    """NCCL does not work on all ranks, and the config has no fallback."""

    def __init__(self, results: Sequence[NcclTrialResult]) -> None:
        super().__init__(f"{explain_nccl_failure(results)}. Or set communication.fallback=gloo, which is slower")
        self.results = list(results)


def explain_nccl_failure(results: Sequence[NcclTrialResult]) -> str:
    """Describes which ranks failed, why, and a fix. Leaves out ranks that only waited for others, if another rank
    reports a cause."""
    failed = [result for result in results if result.error]
    causes = [result for result in failed if "did not come up" not in result.error] or failed
    shown = "; ".join(f"rank {result.rank} ({result.host}): {result.error}" for result in causes[:3])
    more = f"; and {len(causes) - 3} more" if len(causes) > 3 else ""
    advice = next((fix for sign, fix in NCCL_ADVICE if any(sign in result.error for result in causes)), "")
    return (
        f"NCCL does not work on {len(failed)} of {len(results)} ranks: {shown}{more}. "
        f"{f'{advice[0].upper()}{advice[1:]}. ' if advice else ''}"
        "NCCL_DEBUG=INFO with NCCL_DEBUG_SUBSYS=INIT,NET writes more into the ranks' logs"
    )


def choose_backend(
    store: Store,
    rank: int,
    world: int,
    trial: Callable[[], None],
    fallback: BackendFallback,
    trial_s: float = NCCL_TRIAL_S,
) -> tuple[CollectiveBackend, str]:
    """Returns the backend, the same on every rank, and the reason if it is not NCCL.

    Args:
        store: a store whose prefix is used only for this decision and this start of the role.
        trial: runs NCCL with all ranks and raises the error if that fails. It may hang, also in the store, so it must
            not share the connection of `store`.
        trial_s: time limit of the trial.

    Raises:
        NcclUnusable: on every rank, if NCCL failed on one of them and there is no fallback.
        WaitTimeout: rank 0 wrote no decision.
    """
    error = _run_trial(trial, lambda: bool(store.check([_FAILED_KEY])), trial_s)
    if error:
        store.set(_FAILED_KEY, str(rank))
    result = NcclTrialResult(rank, socket.gethostname(), error)
    store.set(f"word/{rank}", json.dumps(asdict(result)))
    if rank == 0:
        until = time.monotonic() + trial_s + TRIAL_MARGIN_S
        results = [result, *(_read_trial_result(store, other, until) for other in range(1, world))]
        store.set("decision", json.dumps([asdict(each) for each in results]))
    raw = waits.store_get(
        store, "decision", waits_for="rank 0", why="NCCL or not", timeout_s=2 * (trial_s + TRIAL_MARGIN_S)
    )  # fmt: skip
    results = [NcclTrialResult(**each) for each in json.loads(raw)]
    if not any(each.error for each in results):
        return "nccl", ""
    if fallback == "none":
        raise NcclUnusable(results)
    return "gloo", explain_nccl_failure(results)


def _run_trial(trial: Callable[[], None], failed: Callable[[], bool], bound_s: float) -> str:
    """Runs the trial in a thread. Returns its error, empty if it succeeded. If the trial hangs, or another rank has
    failed, returns without waiting for the thread."""
    finished = threading.Event()
    outcome: list[str] = []

    def attempt() -> None:
        try:
            trial()
        except Exception as problem:  # noqa: BLE001 - all ranks must learn of any error
            outcome.append(": ".join([type(problem).__name__, *str(problem).strip().splitlines()[:1]]))
        else:
            outcome.append("")
        finished.set()

    threading.Thread(target=attempt, name="NCCL trial", daemon=True).start()
    try:
        waits.poll(
            lambda: True if outcome or failed() else None, kind="rendezvous", waits_for="NCCL",
            why="whether it can be brought up", every_s=0.25, wake=finished, timeout_s=bound_s,
        )  # fmt: skip
    except WaitTimeout:
        return f"it did not come up within {bound_s:.0f} s"
    return outcome[0] if outcome else "it did not come up before another rank failed"


def _read_trial_result(store: Store, rank: int, until: float) -> NcclTrialResult:
    left = max(0.1, until - time.monotonic())
    try:
        raw = waits.store_get(
            store, f"word/{rank}", waits_for=f"rank {rank}", why="whether it has NCCL", timeout_s=left
        )
    except WaitTimeout:
        return NcclTrialResult(rank, "host not known", f"no result within {left:.0f} s")
    return NcclTrialResult(**json.loads(raw))


def nccl_trial(store: Store, rank: int, world: int, device: torch.device, bound_s: float = NCCL_TRIAL_S) -> None:
    """Runs one small all-reduce on a temporary NCCL communicator."""
    if not dist.is_nccl_available():
        raise RuntimeError("this torch has no NCCL")
    torch.cuda.set_device(device)  # applies to this thread only
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=2 * bound_s)  # longer than our own, because NCCL's watchdog ends the process
    group = dist.ProcessGroupNCCL(PrefixStore("nccl", store), rank, world, options)
    try:
        ones = torch.ones(LATENCY_ELEMENTS, device=device)
        work = group.allreduce([ones])  # type: ignore[attr-defined]  # it is a Backend, which the stubs do not say
        waits.work(work, communicator="trial", operation="all_reduce", why="NCCL", timeout_s=bound_s)
        if ones[-1].item() != world:
            raise RuntimeError(f"an all_reduce of ones over {world} ranks gave {ones[-1].item():g}")
    finally:
        group.abort()


def measure_collectives(group: dist.ProcessGroup, world: int, device: torch.device, timeout_s: float) -> CollectiveCost:
    """Measures an all_reduce and an all_gather among all ranks. Every rank calls it."""
    latency, rate = {}, {}
    for size in (LATENCY_ELEMENTS, BANDWIDTH_ELEMENTS):
        local = torch.zeros(size, device=device)
        parts = [torch.empty_like(local) for _ in range(world)]

        def all_reduce(local: torch.Tensor = local) -> Any:
            return dist.all_reduce(local, group=group, async_op=True)

        def all_gather(local: torch.Tensor = local, parts: list[torch.Tensor] = parts) -> Any:
            return dist.all_gather(parts, local, group=group, async_op=True)

        for name, issue in (("all_reduce", all_reduce), ("all_gather", all_gather)):
            seconds = min(_time_collective(issue, name, timeout_s) for _ in range(MEASURED_ROUNDS))
            if size == LATENCY_ELEMENTS:
                latency[name] = 1e3 * seconds
            else:
                rate[name] = 4 * size / seconds / 1e6
    return CollectiveCost(latency, rate)


def _time_collective(issue: Callable[[], Any], name: str, timeout_s: float) -> float:
    began = time.monotonic()
    waits.work(issue(), communicator="trainer", operation=name, why="what it costs", timeout_s=timeout_s)
    return time.monotonic() - began
