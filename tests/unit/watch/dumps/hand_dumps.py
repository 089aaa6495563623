"""Flight-recorder dumps written entry by entry, in the form of torch 2.11 to 2.13, for tests of single rules.

Times are seconds after `BEGAN_S`. A communicator is given by a label whose first word is its description: `tp 1`.
"""

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.watch.diagnosis.verdict import Verdict
from lockstep.watch.dumps.decode import DumpDecoder
from lockstep.watch.dumps.dump_files import DumpFile
from lockstep.watch.dumps.explain_dumps import judge_dumps

BEGAN_S = 1_790_000_000
TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Op:
    """An operation of a rank: a collective, or with a name such as `send 0->1` a single send or receive."""

    group: str
    number: int
    """Among the collectives of the communicator, or among its sends and receives."""
    name: str = "all_reduce"
    ended: bool = False
    started: bool = False
    at: float = 100.0
    """When it was issued."""

    @property
    def is_transfer(self) -> bool:
        return "<-" in self.name or "->" in self.name


class HandDumps:
    """The dumps of a job with the given communicators: label and ranks, in the order of creation over all ranks."""

    def __init__(self, groups: Mapping[str, Sequence[int]]) -> None:
        self.groups = {label: tuple(ranks) for label, ranks in groups.items()}
        self.contents: dict[int, dict[str, Any]] = {}

    def add(
        self, rank: int, *operations: Op, lost: int = 0, status: Mapping[str, tuple[int, int]] | None = None
    ) -> None:
        """Adds the dump of a rank.

        Args:
            operations: those in the recorder, oldest first.
            lost: how many older ones have been overwritten.
            status: the last operation issued and the last one ended, by label, of communicators without entries.
        """
        own = [label for label, ranks in self.groups.items() if rank in ranks]
        counts = {label: _counts(label, operations) for label in own if any(each.group == label for each in operations)}
        counts |= status or {}
        self.contents[rank] = {
            "version": "2.10",
            "comm_lib_version": "2.27.3",
            "pg_config": {
                self._name(label): {"name": self._name(label), "desc": label.split()[0],
                                    "ranks": str(list(self.groups[label]))} for label in own
            },
            "pg_status": {
                str(own.index(label)): {"last_enqueued_collective": issued, "last_started_collective": -1,
                                        "last_completed_collective": ended} for label, (issued, ended) in counts.items()
            },
            "entries": [self._entry(each, own.index(each.group), at) for at, each in enumerate(operations, lost)],
        }  # fmt: skip

    def judge(self, written_at: float = 100.0 + TIMEOUT_S) -> list[Verdict]:
        """The verdicts on the dumps, whose files were written at the given time."""
        decoder = DumpDecoder()

        def read(full: bool, ranks: Sequence[int]) -> list[tuple[DumpFile, Any]]:
            return [(DumpFile(Path(f"nccl_trace_rank_{rank}"), rank, 0, BEGAN_S + written_at),
                     decoder.read(pickle.dumps(self.contents[rank], 2), full)) for rank in ranks]  # fmt: skip

        return judge_dumps(
            read(False, list(self.contents)),
            lambda files: read(True, [each.rank for each in files if each.rank is not None]),
            decoder.calls,
        )

    def named(self) -> set[int | None]:
        """The culprits of all verdicts."""
        return {each.rank for verdict in self.judge() for each in verdict.culprits}

    def not_excluded(self) -> set[int]:
        return {rank for verdict in self.judge() for rank in verdict.not_excluded}

    def _name(self, label: str) -> str:
        return str(list(self.groups).index(label))

    def _entry(self, operation: Op, pg_id: int, position: int) -> dict[str, Any]:
        at = int((BEGAN_S + operation.at) * 1e9)
        return {
            "record_id": position, "pg_id": pg_id, "op_id": operation.number,
            "process_group": (self._name(operation.group), operation.group.split()[0]),
            "collective_seq_id": 0 if operation.is_transfer else operation.number,
            "p2p_seq_id": operation.number if operation.is_transfer else 0,
            "profiling_name": f"nccl:{operation.name}", "is_p2p": operation.is_transfer,
            "input_sizes": [[8]], "input_dtypes": ["Float"], "output_sizes": [[8]], "output_dtypes": ["Float"],
            "state": "completed" if operation.ended else "started" if operation.started else "scheduled",
            "time_created_ns": at,
            "time_discovered_started_ns": at + 1000 if operation.started else None,
            "time_discovered_completed_ns": at + 2000 if operation.ended else None,
            "retired": operation.ended, "timeout_ms": int(TIMEOUT_S * 1000), "thread_id": "1", "thread_name": "main",
        }  # fmt: skip


def _counts(label: str, operations: Sequence[Op]) -> tuple[int, int]:
    """The last operation of a communicator that was issued, and the last one that has ended."""
    own = [each for each in operations if each.group == label]
    oldest_open = min((each.number for each in own if not each.ended), default=own[-1].number + 1)
    return own[-1].number, oldest_open - 1
