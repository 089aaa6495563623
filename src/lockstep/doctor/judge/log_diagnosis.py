"""Explains why a job failed: reads the files and derives one verdict."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lockstep.doctor.judge import collective_waits, prior_verdicts
from lockstep.doctor.judge.culprits import find_culprits
from lockstep.doctor.judge.detectors.first_exception import exception_candidates
from lockstep.doctor.judge.detectors.rank_differences import difference_candidates, stack_candidates
from lockstep.doctor.judge.detectors.similar_text import similar_candidates
from lockstep.doctor.judge.detectors.timeout_structure import structure_candidates
from lockstep.doctor.judge.hypotheses import NO_FAULT, FailureHypothesis, JobEvidence, propose
from lockstep.doctor.judge.job_history import JobHistory, build_history
from lockstep.doctor.judge.scoring import Judgement, judge_hypotheses, load_weights
from lockstep.doctor.knowledge.knowledge_base import KnowledgeBase, load_knowledge
from lockstep.doctor.logs.log_parser import parse_logs
from lockstep.doctor.logs.log_sources import collect_sources
from lockstep.doctor.logs.parsed_log import ParsedLog, RuleMatch
from lockstep.watch.diagnosis.verdict import (
    MIN_ACTION_CONFIDENCE,
    Alternative,
    Culprit,
    Fact,
    StalledCollective,
    Verdict,
    VerdictKind,
    VerdictLevel,
)

MAX_EVIDENCE = 8
_MIN_CHARS = 4
"""Shorter lines are not used as evidence."""
_LINES_PER_RULE, _FIRST_FACTS, _VICTIM_FACTS = 3, 4, 2
_FACTORS = "inference"
"""The source of the evidence that says what decided."""
_DETECTORS = (difference_candidates, exception_candidates, structure_candidates, stack_candidates)
_KIND_OF_CLASS = {
    cls: kind
    for kind, classes in {
        VerdictKind.MISMATCH: ("uneven_data", "rank_divergent_branch", "zero3_generate_desync"),
        VerdictKind.ABSENT: ("slow_rank_preprocess", "checkpoint_timeout", "rendezvous_incomplete"),
        VerdictKind.DEAD: ("rank_oom", "host_oom", "rank_exception_masked", "external_kill", "cuda_kernel_error",
                           "nan_or_inf", "vllm_engine_failure", "config_error", "version_mismatch", "storage_fault",
                           "shm_too_small"),
        VerdictKind.IN_FLIGHT: ("p2p_path_broken", "network_blocked", "ib_rdma_fault"),
        VerdictKind.SLOW: ("slow_collective_timeout",),
        VerdictKind.STARVED: ("ray_resources_pending",),
    }.items()
    for cls in classes
}  # fmt: skip


@dataclass
class Explanation:
    """A verdict with the data from which it was derived."""

    verdict: Verdict
    history: JobHistory
    judgement: Judgement
    rules: KnowledgeBase
    gaps: list[str] = field(default_factory=list)
    recorded: Sequence[Verdict] = ()
    """The verdicts of incidents or dumps that replaced the verdict of the logs; `verdict` is the first of them."""


@dataclass(frozen=True, slots=True)
class JobRecord:
    """What the files of a job hold, before anything is concluded from it.

    Attributes:
        prior: The verdicts of its incidents and dumps.
        gaps: The files that could not be read.
    """

    logs: Sequence[ParsedLog]
    prior: prior_verdicts.PriorVerdicts
    gaps: list[str]


class NothingToRead(ValueError):
    """The paths contain nothing that can be explained."""

    def __init__(self, paths: Sequence[str]) -> None:
        self.paths = tuple(paths)
        super().__init__(
            f"{', '.join(paths)}: found no log with lines in it, no flight-recorder dump (such as "
            "nccl_trace_rank_0) and no incident (verdict.json)"
        )


def explain(
    paths: Sequence[str], folders: Sequence[Path] = (), *, ranks: str | None = None, world_size: int | None = None
) -> Explanation:
    """Explains why the job failed that wrote these files: logs, flight-recorder dumps, incidents.

    Args:
        paths: Files and folders; "-" is standard input.
        folders: Folders of further knowledge files.
        ranks: Pattern for the rank in the names of dumps, see `explain_dumps`.
        world_size: Number of ranks of the job; None takes it from the dumps.

    Raises:
        NoSuchPath: A path does not exist.
        NothingToRead: There is no line, no dump and no incident.
        InvalidRule: A knowledge file violates the schema.
    """
    rules = load_knowledge(*folders)
    return judge_job(read_job(paths, rules, ranks=ranks, world_size=world_size), rules)


def read_job(
    paths: Sequence[str],
    rules: KnowledgeBase,
    *,
    ranks: str | None = None,
    world_size: int | None = None,
    progress: Callable[[int, int, int], None] | None = None,
) -> JobRecord:
    """Reads the files of a job, with the arguments of `explain` and of `parse_logs`.

    Raises:
        NothingToRead: There is no line, no dump and no incident.
    """
    found = collect_sources(list(paths))
    prior = prior_verdicts.read_prior_verdicts(found, paths, ranks=ranks, world_size=world_size)
    logs = parse_logs(found, rules, progress)
    if not (any(log.lines for log in logs) or prior.incidents or prior.dumps):
        raise NothingToRead(paths)
    return JobRecord(logs, prior, found.gaps)


def judge_job(job: JobRecord, rules: KnowledgeBase) -> Explanation:
    """Derives the verdict from what was read."""
    history = build_history(job.logs)
    weights = load_weights()
    judgement = judge_hypotheses(gather_evidence(history, rules), weights)
    verdict = _verdict(judgement, find_culprits(judgement.best, history, weights.culprits), history, rules, job.gaps)
    recorded = prior_verdicts.overriding_verdicts(verdict, job.prior, logs_read=bool(job.logs))
    if recorded:
        return Explanation(recorded[0], history, judgement, rules, job.gaps, recorded)
    return Explanation(prior_verdicts.merge_dumps(verdict, job.prior), history, judgement, rules, job.gaps)


def gather_evidence(history: JobHistory, rules: KnowledgeBase) -> JobEvidence:
    """Collects the hypotheses about a job, of all signatures and detectors."""
    structural = [each for detect in _DETECTORS for each in detect(history)]
    return propose(history, [*structural, *similar_candidates(history, rules, structural)])


def _verdict(
    judgement: Judgement, culprits: tuple[Culprit, ...], history: JobHistory, rules: KnowledgeBase, gaps: Sequence[str]
) -> Verdict:
    best = judgement.best
    lead = best.matches[0] if best.matches else None
    about = lead.rule.about if lead and lead.rule.cls == best.cls else rules.about.get(best.cls)
    fields = dict(lead.fields) if lead else {}
    signature = lead.rule.signature if lead and lead.rule.cls == best.cls else None
    explanation = best.explanation or (signature and signature.explanation) or (about.explanation if about else "")
    fix = (signature and signature.fix) or (about.fix if about else "")
    collect = (signature.collect if signature and signature.collect is not None else about.collect) if about else ()
    return Verdict(
        kind=VerdictKind.UNKNOWN if best.cls in NO_FAULT else _KIND_OF_CLASS.get(best.cls, VerdictKind.UNKNOWN),
        level=VerdictLevel.CONFIRMED
        if judgement.proven and judgement.confidence >= MIN_ACTION_CONFIDENCE and best.cls not in NO_FAULT
        else VerdictLevel.NOTICE,
        culprits=culprits,
        cause=best.cls,
        collective=_collective(best, history),
        confidence=judgement.confidence,
        alternatives=tuple(Alternative(each.cls, round(weight, 3)) for each, weight in judgement.others),
        evidence=_evidence(judgement, culprits, history),
        explanation=fill_fields(explanation or "", fields),
        fix=fill_fields(fix or "", fields),
        collect=(*collect, *(f"a readable copy of {gap}" for gap in gaps[:4])),
    )


def _collective(best: FailureHypothesis, history: JobHistory) -> StalledCollective | None:
    """Returns the collective that the cause names, or the one in which the ranks waited; None if neither is known."""
    operation = best.collective
    for each in best.matches:
        operation = operation or each.fields.get("op", "") or (each.rule.signature.collective or "")
        if not operation and each.traceback is not None:
            operation = collective_waits.collective_of_frames(each.traceback.frames)
    seq = None
    if not operation:
        ended = list(collective_waits.waits_by_rank(history).values())
        counted = Counter(each.operation for each in ended if each.operation) or collective_waits.count_collectives(
            history
        )
        operation = counted.most_common(1)[0][0] if counted else ""
        seq = next((each.seq for each in ended if each.operation == operation), None)
    if not operation or best.cls == "benign":
        return None
    return StalledCollective("", seq if seq is not None else -1, operation.lower())


def _evidence(judgement: Judgement, culprits: tuple[Culprit, ...], history: JobHistory) -> tuple[Fact, ...]:
    """Returns the evidence: the lines of the culprits, the structure, and the first victims, in this order, then what
    decided for the class."""
    best = judgement.best
    culprit_ranks = {each.rank for each in culprits} - {None}
    structural = [each for each in best.facts if len(each.text) >= _MIN_CHARS]
    matched = _match_facts(
        sorted(best.matches, key=lambda each: history.rank(each) not in culprit_ranks)
        if culprit_ranks
        else best.matches
    )
    victims = [each for each in history.failures if each.rule.signature.fact != "cancelled"]
    last = _match_facts(victims[:_VICTIM_FACTS]) if best.cls != "benign" else []
    first = (
        [*structural[:_FIRST_FACTS], *matched[:_FIRST_FACTS]]
        if best.culprits
        else [*matched[:_FIRST_FACTS], *structural[:_FIRST_FACTS]]
    )
    facts = [*first, *matched[_FIRST_FACTS:], *structural[_FIRST_FACTS:], *last]
    shown = tuple({(each.file, each.line): each for each in facts}.values())[:MAX_EVIDENCE]
    return (*shown, *(Fact(each, source=_FACTORS) for each in judgement.reasons if shown))


def _match_facts(matches: Iterable[RuleMatch]) -> list[Fact]:
    """Returns the lines of the matches, a few per rule."""
    rules: Counter[str] = Counter()
    found = []
    for each in matches:
        rules[each.rule.id] += 1
        if rules[each.rule.id] <= _LINES_PER_RULE and len(each.text) >= _MIN_CHARS:
            found.append(Fact(each.text, file=each.file, line=each.line))
    return found


def fill_fields(text: str, fields: dict[str, str]) -> str:
    """Replaces each `{field}` of a text; omits sentences with an unknown field."""
    sentences = re.split(r"(?<=[.!?])\s+", text.strip())
    kept = []
    for each in sentences:
        names = re.findall(r"\{(\w+)\}", each)
        if all(name in fields for name in names):
            kept.append(re.sub(r"\{(\w+)\}", lambda found: fields[found[1]], each))
    return " ".join(kept)
