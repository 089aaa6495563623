"""From paths to one verdict."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lockstep.doctor import compared, lasting, late, recorded, snapshots, structure
from lockstep.doctor import waits as waiting
from lockstep.doctor.attempts import old_sources
from lockstep.doctor.clocks import align, date
from lockstep.doctor.culprits import blamed
from lockstep.doctor.filter import Filter
from lockstep.doctor.judge import Candidate, Judgement, judge
from lockstep.doctor.lines import pages
from lockstep.doctor.rules import Rules, load
from lockstep.doctor.sightings import Reader, Reading, Sighting
from lockstep.doctor.sources import Gathered, gather, streams
from lockstep.doctor.story import Story, tell
from lockstep.doctor.tracebacks import LAST, STARTS
from lockstep.watch.verdict import SURE, Alternative, Collective, Fact, Kind, Level, Verdict

EVIDENCE = 8
_SHORTEST = 4
_OF_RULE, _FIRST, _VICTIMS = 3, 4, 2
_NO_FAULT = ("unknown", "benign")
_ROOMS = (compared, structure, snapshots, lasting, late)
_KINDS = {
    "uneven_data": Kind.MISMATCH, "rank_divergent_branch": Kind.MISMATCH, "zero3_generate_desync": Kind.MISMATCH,
    "slow_rank_preprocess": Kind.ABSENT, "checkpoint_timeout": Kind.ABSENT, "rendezvous_incomplete": Kind.ABSENT,
    "rank_oom": Kind.DEAD, "host_oom": Kind.DEAD, "rank_exception_masked": Kind.DEAD, "external_kill": Kind.DEAD,
    "cuda_kernel_error": Kind.DEAD, "nan_or_inf": Kind.DEAD, "vllm_engine_failure": Kind.DEAD,
    "config_error": Kind.DEAD, "version_mismatch": Kind.DEAD, "storage_fault": Kind.DEAD, "shm_too_small": Kind.DEAD,
    "p2p_path_broken": Kind.IN_FLIGHT, "network_blocked": Kind.IN_FLIGHT, "ib_rdma_fault": Kind.IN_FLIGHT,
    "slow_collective_timeout": Kind.SLOW, "ray_resources_pending": Kind.STARVED,
}  # fmt: skip


@dataclass
class Explained:
    """A verdict with what it was made from."""

    verdict: Verdict
    story: Story
    judgement: Judgement
    rules: Rules
    gaps: list[str] = field(default_factory=list)
    recorded: Sequence[Verdict] = ()
    """Verdicts of incidents or dumps that stand as they are, `verdict` first."""


def explain(
    paths: Sequence[str], folders: Sequence[Path] = (), *, ranks: str | None = None, world_size: int | None = None
) -> Explained:
    """What was wrong with the job that left these files: logs, dumps of the flight recorder, incidents.

    Args:
        folders: Of further knowledge files.
        ranks: Where the rank stands in the names of dumps, see `read_dumps`.
        world_size: Of the job; None takes what the dumps say.

    Raises:
        NoSuchPath: A path that does not exist.
        BadRule: A file of rules that is not of the schema.
    """
    rules = load(*folders)
    found = gather(list(paths))
    left = recorded.take(found, paths, ranks=ranks, world_size=world_size)
    readings = read(found, rules)
    story = tell(readings)
    judgement = judge(story, [each for room in _ROOMS for each in room.candidates(story)])
    verdict = _verdict(judgement, story, rules, found.gaps)
    before = recorded.stands(verdict, left, logs_read=bool(readings))
    if before:
        return Explained(before[0], story, judgement, rules, found.gaps, before)
    return Explained(recorded.joined(verdict, left), story, judgement, rules, found.gaps)


def read(found: Gathered, rules: Rules) -> list[Reading]:
    """All sources, one after the other."""
    prefilter = Filter([*rules.by_literal, *STARTS, *LAST])
    many = len(found.sources)
    readings = [Reader(rules, prefilter, source.name, number, many).read(pages(blocks))
                for number, (source, blocks) in enumerate(streams(found.sources, found.gaps))]  # fmt: skip
    date(readings)
    old = old_sources(readings)
    align([each for each in readings if each.source not in old])
    return readings


def _verdict(judgement: Judgement, story: Story, rules: Rules, gaps: Sequence[str]) -> Verdict:
    best = judgement.best
    lead = best.sightings[0] if best.sightings else None
    about = lead.rule.about if lead and lead.rule.cls == best.cls else rules.about.get(best.cls)
    fields = dict(lead.fields) if lead else {}
    signature = lead.rule.signature if lead and lead.rule.cls == best.cls else None
    explanation = best.explanation or (signature and signature.explanation) or (about.explanation if about else "")
    fix = (signature and signature.fix) or (about.fix if about else "")
    collect = (signature.collect if signature and signature.collect is not None else about.collect) if about else ()
    return Verdict(
        kind=Kind.UNKNOWN if best.cls in _NO_FAULT else _KINDS.get(best.cls, Kind.UNKNOWN),
        level=Level.CONFIRMED if judgement.confidence >= SURE and best.cls not in _NO_FAULT else Level.NOTICE,
        culprits=blamed(best, story),
        cause=best.cls,
        collective=_collective(best, story),
        confidence=judgement.confidence,
        alternatives=tuple(Alternative(each.cls, round(weight, 3)) for each, weight in judgement.others),
        evidence=_evidence(best, story),
        explanation=filled(explanation or "", fields),
        fix=filled(fix or "", fields),
        collect=(*collect, *(f"what could not be read: {gap}" for gap in gaps[:4])),
    )


def _collective(best: Candidate, story: Story) -> Collective | None:
    """What the ranks waited in, or what the cause names."""
    operation = best.collective
    for each in best.sightings:
        operation = operation or each.fields.get("op", "") or (each.rule.signature.collective or "")
        if not operation and each.traceback is not None:
            operation = waiting.operation(each.traceback.frames)
    seq = None
    if not operation:
        ended = list(waiting.waits(story).values())
        counted = Counter(each.operation for each in ended if each.operation) or waiting.operations(story)
        operation = counted.most_common(1)[0][0] if counted else ""
        seq = next((each.seq for each in ended if each.operation == operation), None)
    if not operation or best.cls == "benign":
        return None
    return Collective("", seq if seq is not None else -1, operation.lower())


def _evidence(best: Candidate, story: Story) -> tuple[Fact, ...]:
    """What shows it, those who are to blame first, then what shows the structure, then what the first victims say."""
    blame = {each.rank for each in blamed(best, story)} - {None}
    own = [each for each in best.facts if len(each.text) >= _SHORTEST]
    shown = _lines(sorted(best.sightings, key=lambda each: story.rank(each) not in blame) if blame else best.sightings)
    victims = [each for each in story.failures if each.rule.signature.fact != "cancelled"]
    last = _lines(victims[:_VICTIMS]) if best.cls != "benign" else []
    first = [*own[:_FIRST], *shown[:_FIRST]] if best.culprits else [*shown[:_FIRST], *own[:_FIRST]]
    kept = {(each.file, each.line): each for each in [*first, *shown[_FIRST:], *own[_FIRST:], *last]}
    return tuple(kept.values())[:EVIDENCE]


def _lines(sightings: Iterable[Sighting]) -> list[Fact]:
    """Of each rule a few lines."""
    rules: Counter[str] = Counter()
    found = []
    for each in sightings:
        rules[each.rule.id] += 1
        if rules[each.rule.id] <= _OF_RULE and len(each.text) >= _SHORTEST:
            found.append(Fact(each.text, file=each.file, line=each.line))
    return found


def filled(text: str, fields: dict[str, str]) -> str:
    """`{field}` replaced; a sentence with one that is not known is left out."""
    sentences = re.split(r"(?<=[.!?])\s+", text.strip())
    kept = []
    for each in sentences:
        names = re.findall(r"\{(\w+)\}", each)
        if all(name in fields for name in names):
            kept.append(re.sub(r"\{(\w+)\}", lambda found: fields[found[1]], each))
    return " ".join(kept)
