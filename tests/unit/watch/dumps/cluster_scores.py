"""Scores the analysis of dumps on simulated clusters with known faults."""

import random
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from cluster_dumps import Recorder, draw_recorder, dump_bytes, dumped_at, missing_ranks
from cluster_simulator import Cluster, faulty_cluster

from lockstep.watch.diagnosis.verdict import Verdict, VerdictKind
from lockstep.watch.dumps.decode import DumpDecoder
from lockstep.watch.dumps.dump_files import DumpFile
from lockstep.watch.dumps.explain_dumps import judge_dumps

WRITES_A_DUMP, WRITES_NONE = ("host", "device", "unfinished"), ("stopped", "killed")


@dataclass(frozen=True)
class Score:
    """What the analysis says of a cluster."""

    seed: int
    faulty: frozenset[int]
    named: frozenset[int]
    """The culprits of the first verdict."""
    innocents: frozenset[int]
    """The ranks without a fault that any verdict names."""
    verdicts: tuple[Verdict, ...]

    @property
    def exact(self) -> bool:
        return self.named == self.faulty

    @property
    def silent(self) -> bool:
        """Whether the answer is that no rank can be named."""
        return not self.named


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
    named = [frozenset(each.rank for each in verdict.culprits if each.rank is not None) for verdict in verdicts]
    return Score(cluster.seed, faulty, named[0], frozenset().union(*named) - faulty, tuple(verdicts))


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


def summary(scores: Iterable[Score]) -> dict[str, int]:
    """How many are exact, name a part of the faulty ranks, name none, name an innocent rank; and how many there are."""
    done = list(scores)
    return {
        "cases": len(done),
        "exact": sum(each.exact for each in done),
        "part": sum(bool(each.named) and each.named < each.faulty for each in done),
        "none": sum(each.silent for each in done),
        "innocent": sum(bool(each.innocents) for each in done),
        "unknown": sum(each.verdicts[0].kind is VerdictKind.UNKNOWN for each in done),
    }
