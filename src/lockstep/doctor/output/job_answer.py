"""What `lockstep explain` answers about the files of a job: the one form that text, JSON, page and bundle show."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lockstep.doctor.environment.incident_environment import incident_finding_lines, newest_incident
from lockstep.doctor.judge.log_diagnosis import Explanation, NothingToRead, judge_job, read_job
from lockstep.doctor.knowledge.knowledge_base import KnowledgeBase, load_knowledge
from lockstep.doctor.logs.log_sources import collect_sources
from lockstep.doctor.logs.parsed_log import ParsedLog
from lockstep.doctor.runs import run_outcome
from lockstep.doctor.runs.run_outcome import RunRecord, RunState
from lockstep.watch.diagnosis.verdict import Verdict

_DISTINGUISHING = {
    "benign": ("whether the job made further steps after these lines, or ended with exit code 0",),
    "unknown": (),
}
"""What tells a class whose knowledge file names nothing to collect from others."""
_MAX_ITEMS = 2
"""Pieces of evidence that are named per alternative."""


@dataclass(frozen=True, slots=True)
class OtherCause:
    """An alternative to a verdict.

    Attributes:
        title: What the class means, in a few words; "" for a kind of wait.
        distinguish: What to look at, to tell it from the verdict's cause.
    """

    cause: str
    title: str
    confidence: float
    distinguish: tuple[str, ...]

    def json(self) -> dict[str, Any]:
        return {
            "class": self.cause,
            "title": self.title,
            "confidence": self.confidence,
            "collect": list(self.distinguish),
        }


@dataclass(frozen=True, slots=True)
class JobAnswer:
    """A verdict with what a reader needs to understand it.

    Attributes:
        paths: What was read.
        title: The verdict in a few words.
        others: The verdict's alternatives.
        logs: The logs that were read, for the timeline.
        recorded: Whether the verdict was recorded in incidents or dumps.
        further: Further recorded verdicts.
        run: The record of a run of ours; None for other jobs.
        environment: Findings about the environment variables of the newest incident.
        gaps: What could not be read.
        ranks, world_size: With what the dumps were read, see `judge_files`.
    """

    paths: tuple[str, ...]
    verdict: Verdict
    title: str
    rules: KnowledgeBase
    others: tuple[OtherCause, ...] = ()
    logs: Sequence[ParsedLog] = ()
    recorded: bool = False
    further: Sequence[Verdict] = ()
    run: RunRecord | None = None
    environment: Sequence[str] = ()
    gaps: Sequence[str] = ()
    ranks: str | None = None
    world_size: int | None = None

    @property
    def healthy(self) -> bool:
        return self.verdict.cause == "benign"

    def json(self) -> dict[str, Any]:
        """Returns the answer for `--json`: the verdict, with the alternatives' distinguishing evidence."""
        found = self.verdict.json() | {"distinguish": [each.json() for each in self.others]}
        if self.run is not None:
            found["run"] = run_outcome.outcome_json(self.run)
        return found


def answer_job(
    paths: Sequence[str],
    folders: Sequence[Path] = (),
    *,
    ranks: str | None = None,
    world_size: int | None = None,
    progress: Callable[[int, int, int], None] | None = None,
) -> JobAnswer:
    """Explains a job, or a run of ours.

    Args:
        folders: Folders of further knowledge files.

    For the other arguments and the errors see `judge_files`.
    """
    return judge_files(paths, load_knowledge(*folders), ranks=ranks, world_size=world_size, progress=progress)


def judge_files(
    paths: Sequence[str],
    rules: KnowledgeBase,
    *,
    ranks: str | None = None,
    world_size: int | None = None,
    progress: Callable[[int, int, int], None] | None = None,
) -> JobAnswer:
    """Explains a job, or a run of ours, with rules that are loaded already.

    Args:
        paths: Files and folders; "-" is standard input.
        ranks: Pattern for the rank in the names of dumps.
        world_size: Number of ranks; None takes it from the dumps.
        progress: Called with the files that are read, their number, and the bytes read.

    Raises:
        ValueError: A path does not exist, there is nothing to read, or a file violates its format.
        LedgerError: The ledger of a run is damaged.
    """
    own = run_outcome.find_run_folder(Path(paths[0])) if len(paths) == 1 else None
    if own is not None:
        return _answer_run(own, rules, progress)
    explained = judge_job(read_job(paths, rules, ranks=ranks, world_size=world_size, progress=progress), rules)
    return replace(_answer_explanation(tuple(paths), explained), ranks=ranks, world_size=world_size)


def _answer_explanation(paths: tuple[str, ...], explained: Explanation) -> JobAnswer:
    verdict, incident = explained.verdict, newest_incident(list(paths))
    return JobAnswer(
        paths=paths,
        verdict=verdict,
        title=_title(verdict, explained.rules),
        rules=explained.rules,
        others=other_causes(verdict, explained.rules),
        logs=explained.history.logs,
        recorded=bool(explained.recorded),
        further=explained.recorded[1:],
        environment=tuple(incident_finding_lines(incident)) if incident is not None else (),
        gaps=explained.gaps,
    )


def _answer_run(folder: Path, rules: KnowledgeBase, progress: Callable[[int, int, int], None] | None) -> JobAnswer:
    """Answers from the record of a run; its logs give a failed one its class, and the page its lines of time."""
    record = run_outcome.read_record(folder)
    explained = _explain_logs(folder / "logs", rules, progress)
    verdict = run_outcome.judge_run(record, None if explained is None else explained.verdict)
    incident = newest_incident([str(folder / "incidents")]) if record.incidents else None
    return JobAnswer(
        paths=(str(folder),),
        verdict=verdict,
        title=run_outcome.run_title(record),
        rules=rules,
        others=other_causes(verdict, rules) if record.state is not RunState.FINISHED else (),
        logs=() if explained is None else explained.history.logs,
        run=record,
        environment=tuple(incident_finding_lines(incident)) if incident is not None else (),
        gaps=() if explained is None else explained.gaps,
    )


def _explain_logs(
    folder: Path, rules: KnowledgeBase, progress: Callable[[int, int, int], None] | None
) -> Explanation | None:
    try:
        found = collect_sources([str(folder)]) if folder.is_dir() else None
    except ValueError:
        found = None
    if found is None or not found.sources:
        return None
    try:
        return judge_job(read_job([str(folder)], rules, progress=progress), rules)
    except NothingToRead:  # the processes of the run printed nothing
        return None


def _title(verdict: Verdict, rules: KnowledgeBase) -> str:
    about = rules.about.get(verdict.cause)
    return about.title if about else "The logs do not show the cause"


def other_causes(verdict: Verdict, rules: KnowledgeBase) -> tuple[OtherCause, ...]:
    """Returns the alternatives of a verdict, each with the evidence that would tell it from the verdict's cause."""
    own = rules.about.get(verdict.cause)
    known = {*verdict.collect, *(own.collect if own else ())}
    found = []
    for each in verdict.alternatives:
        about = rules.about.get(each.what)
        items = about.collect if about and about.collect else _DISTINGUISHING.get(each.what, ())
        telling = [item for item in items if item not in known] or list(items)
        if each.what in ("unknown", verdict.cause) or not telling:
            telling = list(dict.fromkeys([*telling, *verdict.collect]))
        title = about.title if about else ""
        found.append(OtherCause(each.what, title, each.confidence, tuple(telling[:_MAX_ITEMS])))
    return tuple(found)
