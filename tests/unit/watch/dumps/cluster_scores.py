"""Scores the analysis of dumps on simulated clusters with known faults."""

import math
import random
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from cluster_dumps import Recorder, draw_recorder, dump_bytes, dumped_at, missing_ranks
from cluster_simulator import Cluster, Fault, faulty_cluster, make_cluster, run

from lockstep.watch.diagnosis.verdict import Verdict
from lockstep.watch.dumps.decode import DumpDecoder
from lockstep.watch.dumps.dump_files import DumpFile
from lockstep.watch.dumps.explain_dumps import judge_dumps

WRITES_A_DUMP, WRITES_NONE = ("host", "device", "unfinished"), ("stopped", "killed")


@dataclass(frozen=True)
class Score:
    """What the analysis says of a cluster."""

    seed: int
    faulty: frozenset[int]
    reached: frozenset[int]
    """The faulty ranks that have reached their fault: the others wait for another faulty rank before it."""
    named: frozenset[int]
    """The culprits of all verdicts."""
    not_excluded: frozenset[int]
    """The other ranks that the verdicts do not exclude."""
    verdicts: tuple[Verdict, ...]

    @property
    def innocents(self) -> frozenset[int]:
        """The ranks without a fault that are named."""
        return self.named - self.faulty

    @property
    def exact(self) -> bool:
        """Whether exactly the faulty ranks that have reached their fault are named."""
        return self.named == self.reached

    @property
    def silent(self) -> bool:
        """Whether the answer is that no rank can be named."""
        return not self.named

    @property
    def covered(self) -> bool:
        """Whether all faulty ranks that have reached their fault are named or not excluded."""
        return self.reached <= self.named | self.not_excluded


def oldest_unfinished(cluster: Cluster, rank: int) -> float:
    """The position of the oldest operation of a rank that has not ended; infinite if all have."""
    return min((each.place for each in cluster.issued[rank] if not each.ended), default=math.inf)


def reached_faults(cluster: Cluster) -> frozenset[int]:
    """The faulty ranks that have come as far as they would if their fault were the only one, and whose kernel is not
    one that waits for others."""
    reached = [
        fault for fault in cluster.faults
        if len(cluster.faults) == 1 or _has_come_as_far_as_alone(cluster, fault)
    ]  # fmt: skip
    return frozenset(fault.rank for fault in reached if not _waits_for_others(cluster, fault))


def _has_come_as_far_as_alone(cluster: Cluster, fault: Fault) -> bool:
    alone = run(make_cluster(cluster.seed, (fault,)))
    return oldest_unfinished(cluster, fault.rank) >= oldest_unfinished(alone, fault.rank)


def _waits_for_others(cluster: Cluster, fault: Fault) -> bool:
    """Whether the kernel that should not end has not begun on all members."""
    if fault.kind != "unfinished":
        return False
    own = cluster.issued[fault.rank][fault.place]
    same = [each for issued in cluster.issued for each in issued
            if each.group == own.group and each.sequence == own.sequence and not each.transfers]  # fmt: skip
    return not all(each.running for each in same) or len(same) < len(own.group.ranks)


def judge(cluster: Cluster, recorder: Recorder, missing: Iterable[int] = ()) -> Score:
    """Analyses the dumps of a cluster, without those of `missing` and of the ranks that can write none."""
    absent, decoder = missing_ranks(cluster) | set(missing), DumpDecoder()
    at = dumped_at(cluster)
    data = {rank: dump_bytes(cluster, rank, recorder) for rank in range(cluster.world) if rank not in absent}

    def read(full: bool, ranks: Iterable[int]) -> list[tuple[DumpFile, object]]:
        return [(DumpFile(Path(f"nccl_trace_rank_{rank}"), rank, 0, at), decoder.read(data[rank], full))
                for rank in ranks]  # fmt: skip

    verdicts = judge_dumps(read(False, data), lambda files: read(True, [each.rank for each in files]), decoder.calls)
    faulty = frozenset(fault.rank for fault in cluster.faults)
    named = frozenset(each.rank for verdict in verdicts for each in verdict.culprits if each.rank is not None)
    rest = frozenset(rank for verdict in verdicts for rank in verdict.not_excluded) - named
    return Score(cluster.seed, faulty, reached_faults(cluster), named, rest, tuple(verdicts))


def single(seed: int, kinds: tuple[str, ...]) -> Score:
    """One fault of one of the given kinds."""
    return judge(faulty_cluster(seed, kinds, 1), draw_recorder(seed))


def several(seed: int) -> Score:
    """Two or three faults that leave all dumps."""
    return judge(faulty_cluster(seed, WRITES_A_DUMP, 2 + seed % 2), draw_recorder(seed))


def incomplete(seed: int) -> Score:
    """One to three faults of any kind, and up to a quarter of the dumps are missing."""
    cluster, rng = faulty_cluster(seed, WRITES_A_DUMP + WRITES_NONE, 1 + seed % 3), random.Random(seed)
    return judge(cluster, draw_recorder(seed), rng.sample(range(cluster.world), rng.randint(0, cluster.world // 4)))


def summary(scores: Iterable[Score]) -> dict[str, float]:
    """How many are exact, name a part of the faulty ranks that have reached their fault, name none, name an innocent
    rank, name all faulty ranks or have named or not excluded all that have reached their fault; how many ranks are not
    excluded on average where some are; and how many cases there are."""
    done = list(scores)
    sizes = [len(each.not_excluded) for each in done if each.not_excluded]
    return {
        "cases": len(done),
        "exact": sum(each.exact for each in done),
        "part": sum(bool(each.named) and each.named < each.reached for each in done),
        "none": sum(each.silent for each in done),
        "innocent": sum(bool(each.innocents) for each in done),
        "all_faults_named": sum(each.named == each.faulty for each in done),
        "covered": sum(each.covered for each in done),
        "undecided": len(sizes),
        "not_excluded": round(sum(sizes) / max(1, len(sizes)), 1),
    }
