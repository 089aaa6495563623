"""What the flight recorders of a simulated cluster hold, as torch 2.11 to 2.13 write it (ProcessGroupNCCL.cpp and
FlightRecorderDetail.hpp):

- `pg_id` counts the communicators that a process has created; `pg_status` and `pg_config` are keyed by it and by name.
- A batch of sends and receives increments `collective_seq_id` and `p2p_seq_id` of its rank by one. Its parts are
  recorded without events, so they stay `scheduled` for ever; only the entry `nccl:coalesced` after them has a state.
- A single send or receive increments `p2p_seq_id` only. `pg_status` mixes both counts.
- The start of an operation is recorded only with `TORCH_NCCL_ENABLE_TIMING`.
"""

import json
import pickle
import random
from dataclasses import dataclass
from typing import Any

from cluster_simulator import Cluster, Operation

BEGAN_NS = 1_790_000_000 * 10**9
TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Recorder:
    """How the ranks of a job record."""

    ring: int = 2000
    only_active: bool = False
    timing: bool = False
    json: bool = False


def draw_recorder(seed: int) -> Recorder:
    """The recorder of a seed: rings from 30 entries, so that most lose their oldest ones."""
    rng = random.Random(seed * 31 + 5)
    return Recorder(rng.choice([30, 60, 150, 2000, 2000]), rng.random() < 0.25, rng.random() < 0.4, rng.random() < 0.3)


def missing_ranks(cluster: Cluster) -> set[int]:
    """The ranks whose process can write no dump."""
    return {fault.rank for fault in cluster.faults if fault.kind in ("stopped", "killed")}


def dumped_at(cluster: Cluster) -> float:
    """When the ranks dump: the time-out of the oldest operation that has not ended, or an hour after the start."""
    waits = [each.issued_at for issued in cluster.issued for each in issued if not each.ended]
    return BEGAN_NS / 1e9 + min(waits, default=3600.0) + TIMEOUT_S


def dump_bytes(cluster: Cluster, rank: int, recorder: Recorder) -> bytes:
    """The file of a rank."""
    content = _dump(cluster, rank, recorder)
    if recorder.json:
        for entry in content["entries"]:
            entry |= {key: 0 for key, value in entry.items() if value is None}
        content["pg_status"] = {pg: {key: str(count) for key, count in each.items()}
                                for pg, each in content["pg_status"].items()}  # fmt: skip
        if not content["entries"]:
            del content["entries"]
        return json.dumps(content, sort_keys=True).encode()
    return pickle.dumps(content, 2)


def _dump(cluster: Cluster, rank: int, recorder: Recorder) -> dict[str, Any]:
    own = cluster.groups_of(rank)
    local = {group.number: at for at, group in enumerate(own)}
    skew = random.Random(cluster.seed * 97 + rank).randrange(-20_000_000, 20_000_000)
    counts: dict[int, list[int]] = {group.number: [0, 0, 0] for group in own}
    entries: list[dict[str, Any]] = []
    status: dict[str, dict[str, int]] = {}
    for operation in cluster.issued[rank]:
        group, count = operation.group, counts[operation.group.number]
        count[0] += not operation.transfers or operation.batched
        count[1] += bool(operation.transfers)
        made = list(_entries(operation, rank, local[group.number], count, recorder))
        for entry in made:
            entry["record_id"] = len(entries)
            entry["time_created_ns"] += skew
            entries.append(entry)
        number = count[1] if operation.transfers else count[0]
        each = status.setdefault(str(local[group.number]), {"last_enqueued_collective": -1,
            "last_started_collective": -1, "last_completed_collective": -1})  # fmt: skip
        each["last_enqueued_collective"] = number
        if operation.running and recorder.timing:
            each["last_started_collective"] = number
        if operation.ended:
            each["last_completed_collective"] = number
    kept = entries[-recorder.ring :]
    if recorder.only_active:
        kept = [entry for entry in kept if entry["time_discovered_completed_ns"] is None]
    config = {str(g.number): {"name": str(g.number), "desc": g.description, "ranks": str(list(g.ranks))} for g in own}
    return {"version": "2.10", "pg_config": dict(sorted(config.items())), "comm_lib_version": "2.27.3",
            "pg_status": status, "entries": kept}  # fmt: skip


def _entries(operation: Operation, rank: int, local: int, count: list[int], recorder: Recorder) -> Any:
    group = operation.group
    entry = {
        "pg_id": local, "process_group": (str(group.number), group.description), "collective_seq_id": count[0],
        "p2p_seq_id": count[1], "profiling_name": f"nccl:{operation.name}", "input_sizes": [[1024, 8]],
        "input_dtypes": ["BFloat16"], "output_sizes": [[1024, 8]], "output_dtypes": ["BFloat16"],
        "time_created_ns": BEGAN_NS + int(operation.issued_at * 1e9), "timeout_ms": int(TIMEOUT_S * 1000),
        "thread_id": "1", "thread_name": "pt_main",
    }  # fmt: skip
    started = operation.running and recorder.timing
    with_events = {
        "state": "completed" if operation.ended else "started" if started else "scheduled",
        "time_discovered_started_ns": BEGAN_NS + int(operation.started_at * 1e9) if started else None,
        "time_discovered_completed_ns": BEGAN_NS + int(operation.ended_at * 1e9) if operation.ended else None,
        "retired": operation.ended, "is_p2p": bool(operation.transfers),
    }  # fmt: skip
    without_events = {"state": "scheduled", "time_discovered_started_ns": None, "time_discovered_completed_ns": None,
                      "retired": False, "is_p2p": True}  # fmt: skip
    for source, target in operation.transfers:
        count[2] += 1
        me, peer = (group.ranks.index(each) for each in ((source, target) if source == rank else (target, source)))
        name = f"nccl:send {me}->{peer}" if source == rank else f"nccl:recv {me}<-{peer}"
        events = without_events if operation.batched else with_events
        yield entry | events | {"profiling_name": name, "op_id": count[2]}
    if operation.batched or not operation.transfers:
        count[2] += not operation.transfers
        sizes: dict[str, Any] = {"input_sizes": [], "output_sizes": [], "input_dtypes": [], "output_dtypes": []}
        yield entry | with_events | {"is_p2p": False, "op_id": count[2]} | (sizes if operation.batched else {})
