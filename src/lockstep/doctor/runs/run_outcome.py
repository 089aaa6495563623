"""How one of our own runs ended, or how far it is: from its ledger, its incidents and its summary.

A run folder needs no inference: the ledger records starts, ends, failures and recoveries. Only the class of a failure
is taken from the logs of the run.
"""

import json
import re
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from lockstep.base.json_text import read_json
from lockstep.base.text import count_noun, format_duration, summarize_list
from lockstep.ledger.durable_files import lock_holder
from lockstep.ledger.ledger import Ledger
from lockstep.ledger.run_folder import INDEX_FILE, LOCK_FILE, SUMMARY_FILE
from lockstep.ledger.run_incidents import Incident, incidents_of
from lockstep.ledger.sqlite_index import EventRow
from lockstep.watch.diagnosis.verdict import (
    Alternative,
    Culprit,
    Fact,
    Verdict,
    VerdictKind,
    VerdictLevel,
    parse_verdict,
)

RECORD_FILE = "run-record.json"
"""The record of a run in a bundle, which has no ledger."""
_RECORDED, _LIVING, _KILLED = 0.98, 0.9, 0.6
"""Confidences: of what the ledger records, of a run in progress, and of the guess that a run without end was killed."""
_MOMENTS_PER_INCIDENT, _INCIDENTS = 3, 12
_RAISED_BY_REWARD = re.compile(r"RewardError: reward (?P<path>\S+):(?P<function>\w+): (?P<what>.*)", re.DOTALL)
_NO_CAUSE = ("unknown", "benign", "")


class RunState(StrEnum):
    """How a run ended, or that it has not."""

    FINISHED = "finished"
    RUNNING = "running"
    INTERRUPTED = "interrupted"
    FAILED = "failed"
    KILLED = "killed"
    """No process has the run, and its ledger records no end."""


@dataclass(frozen=True, slots=True)
class RunRecord:
    """What a run folder says about its run.

    Attributes:
        done, wanted: Steps.
        generation: The number of the last attempt, from 1.
        pid: The controller; None if no process on this host has the run.
        last_step_at: When the last step was committed, in seconds since the epoch.
        checkpoint: Steps in the newest checkpoint.
        results: Values of the summary, with their names as text.
    """

    folder: str
    name: str
    recipe: str
    done: int
    wanted: int | None
    generation: int
    events: tuple[EventRow, ...]
    pid: int | None = None
    last_step_at: float | None = None
    checkpoint: int | None = None
    results: Mapping[str, str] = field(default_factory=dict)

    @property
    def state(self) -> RunState:
        end = self.end
        if end is not None:
            word = str(end.fields["reason"]).partition(":")[0]
            return RunState(word) if word in ("finished", "interrupted") else RunState.FAILED
        return RunState.RUNNING if self.pid is not None else RunState.KILLED

    @property
    def end(self) -> EventRow | None:
        """The event that ended the last attempt; None if it has not ended, or was killed."""
        last = [each for each in self.events if each.kind == "end" and each.generation == self.generation]
        return last[-1] if last else None

    @property
    def reason(self) -> str:
        """Why the last attempt ended, as the ledger records it."""
        return str(self.end.fields["reason"]) if self.end is not None else ""

    @property
    def incidents(self) -> list[Incident]:
        return incidents_of(self.events)

    @property
    def unrecovered(self) -> list[Incident]:
        """The incidents of the last attempt that were not recovered. Those of earlier ones ended with their attempt."""
        last = incidents_of([each for each in self.events if each.generation == self.generation])
        return [each for each in last if not each.harmless]

    def json(self) -> dict[str, Any]:
        """Returns the record as JSON, which `parse_record` reads."""
        return asdict(self)


def is_run_folder(path: Path) -> bool:
    """Whether this is the folder of a run, or a bundle with its record."""
    return (path / INDEX_FILE).is_file() or (path / RECORD_FILE).is_file()


def find_run_folder(path: Path) -> Path | None:
    """Returns the folder of the run that a path is, or that is the only one in this folder or in its folders; None if
    there is none, or there are several."""
    if not path.is_dir() or is_run_folder(path):
        return path if path.is_dir() else None
    found = [each for pattern in ("*", "*/*") for each in path.glob(pattern) if is_run_folder(each)]
    return found[0] if len(found) == 1 else None


def read_record(folder: Path) -> RunRecord:
    """Reads the record of a run. Raises LedgerError if the ledger is damaged, ValueError if a bundle's record is."""
    if not (folder / INDEX_FILE).is_file():
        return _parse_record(folder / RECORD_FILE)
    with Ledger.reader(folder) as ledger:
        config, checkpoint, commits = ledger.config(), ledger.newest_checkpoint(), ledger.commit_times()
        return RunRecord(
            folder=str(folder),
            name=str(config.get("name", folder.name)),
            recipe=str(config.get("recipe", "")),
            done=ledger.steps_done(),
            wanted=config.get("steps"),
            generation=ledger.generation,
            events=tuple(ledger.events()),
            pid=lock_holder(folder / LOCK_FILE),
            last_step_at=commits[-1][1] if commits else None,
            checkpoint=None if checkpoint is None else checkpoint.step + 1,
            results=_results(folder / SUMMARY_FILE),
        )


def _parse_record(file: Path) -> RunRecord:
    data = read_json(file)
    try:
        events = tuple(EventRow(**each) for each in data["events"])
        return RunRecord(**data | {"events": events, "folder": str(file.parent)})
    except (KeyError, TypeError) as error:
        raise ValueError(f"{file} is not the record of a run: {error}") from error


def _results(file: Path) -> dict[str, str]:
    """Returns what the summary says about results and time; nothing if there is no summary."""
    try:
        summary = read_json(file)
        found = {}
        for metric in ("eval/exact_match", "eval/reward_mean"):
            values = summary.get(metric) or {}
            if values.get("final") is not None:
                found[metric] = f"{values['first']:.3g} at first, {values['final']:.3g} at the end"
        seconds = summary.get("seconds") or {}
        if seconds:
            longest = sorted(seconds, key=lambda stage: -seconds[stage])[:3]
            parts = ", ".join(f"{stage} {format_duration(seconds[stage])}" for stage in longest)
            found["time"] = f"{format_duration(sum(seconds.values()))} in all steps; most in {parts}"
        return found
    except (OSError, ValueError, TypeError, AttributeError, KeyError):
        return {}


def run_title(record: RunRecord) -> str:
    """Says in one line how the run ended: `The run finished: 12 of 12 steps, 1 incident, recovered`."""
    steps = _steps(record)
    title = {
        RunState.FINISHED: f"The run finished: {steps}",
        RunState.RUNNING: f"The run is in progress: {steps} done",
        RunState.INTERRUPTED: f"The run was stopped on request after {steps}",
        RunState.FAILED: f"The run failed after {steps}",
        RunState.KILLED: f"The run was stopped from outside after {steps}",
    }[record.state]
    incidents = record.incidents
    if not incidents:
        return title
    bad, over = len(record.unrecovered), all(each.harmless for each in incidents)
    how = f"{bad} not recovered" if bad else "recovered" if over else "recovered or ended with an earlier attempt"
    return f"{title}; {count_noun(len(incidents), 'incident')}, {how}"


def judge_run(record: RunRecord, logs: Verdict | None) -> Verdict:
    """Returns the verdict about a run.

    Args:
        logs: The verdict of the run's logs, of which a failed run takes class and evidence.
    """
    state = record.state
    facts = tuple(_facts(record))
    if state in (RunState.FAILED, RunState.KILLED):
        return _verdict_of_end(record, logs, facts)
    stall = _open_incident(record)
    if stall is not None:
        return replace(stall, evidence=(*facts, *stall.evidence))
    return Verdict(
        kind=VerdictKind.UNKNOWN,
        level=VerdictLevel.NOTICE if state is RunState.RUNNING else VerdictLevel.CONFIRMED,
        cause="benign",
        confidence=_LIVING if state is RunState.RUNNING else _RECORDED,
        evidence=facts,
        explanation=" ".join(_sentences(record)),
        fix=_next_command(record),
    )


def _steps(record: RunRecord) -> str:
    """`12 of 40 steps`."""
    if record.wanted is None:
        return count_noun(record.done, "step")
    return f"{record.done:,} of {count_noun(record.wanted, 'step')}"


def _sentences(record: RunRecord) -> list[str]:
    of = f" of {record.wanted:,}" if record.wanted is not None else ""
    said = {
        RunState.FINISHED: f"All went as planned: {_steps(record)} done and committed.",
        RunState.RUNNING: f"{_steps(record)} done; step {record.done + 1:,} is in progress.",
        RunState.INTERRUPTED: f"Ctrl-C or SIGTERM stopped the run after step {record.done:,}{of}; nothing failed.",
        RunState.FAILED: f"Step {record.done + 1:,}{of} failed: {_failure(record)}.",
        RunState.KILLED: "No process on this host has the run, and its ledger records no end: something stopped its "
        f"controller in step {record.done + 1:,}{of} (SIGKILL, lack of memory, or the end of its host), or it runs on "
        "another host.",
    }[record.state]
    early = [each for each in record.events if each.kind == "early_stop" and each.generation == record.generation]
    if record.state is RunState.FINISHED and early:
        said = f"The run stopped early, as configured, after step {record.done:,}{of}: {early[-1].fields['reason']}."
    found = [said]
    if record.generation > 1:
        found.append(f"This was attempt {record.generation}; earlier ones had been stopped, and it resumed from them.")
    healed = [each for each in record.incidents if each.harmless]
    if healed:
        found.append(f"Recovered: {summarize_list([_incident_text(each) for each in healed], 4)}.")
    bad = record.unrecovered
    before = [each for each in record.incidents if not each.harmless and each not in bad]
    for label, some in (("Not recovered", bad), ("Ended an earlier attempt", before)):
        if some:
            found.append(f"{label}: {summarize_list([_incident_text(each) for each in some], 4)}.")
    return found


def _incident_text(incident: Incident) -> str:
    """`engine-0 died (SIGKILL), healed after 0.3s (in 0.3 s, 16 requests re-issued)`."""
    texts = {each.what: each.text for each in incident.moments}
    began = texts.get("failed") or f"{incident.workers} ({incident.what})"
    done = texts.get("restarted") or texts.get("gave up") or ""
    return f"{began}, {incident.outcome_text}{f' ({done})' if done else ''}"


def _failure(record: RunRecord) -> str:
    return record.reason.removeprefix("failed:").strip().rstrip(".") or "the ledger does not say why"


def _facts(record: RunRecord) -> list[Fact]:
    """Returns what the ledger records: start, incidents, last step, end."""
    found = []
    starts = [each for each in record.events if each.kind == "start"]
    if starts:
        found.append(Fact(f"attempt {starts[-1].generation} started at {_clock(starts[-1].at)}", file=INDEX_FILE))
    for each in record.incidents[:_INCIDENTS]:
        place = f"{each.folder}/verdict.json" if each.folder else INDEX_FILE
        found.append(Fact(f"{_clock(each.began)} {each.workers} ({each.what}): {each.outcome_text}", file=place))
        for moment in each.moments[:_MOMENTS_PER_INCIDENT]:
            text = f"{_clock(moment.at)} {moment.what}: {moment.text}"
            found.append(Fact(text, file=place))
    if record.last_step_at is not None:
        found.append(Fact(f"step {record.done} was committed at {_clock(record.last_step_at)}", file=INDEX_FILE))
    if record.checkpoint is not None:
        found.append(Fact(f"the newest checkpoint holds {count_noun(record.checkpoint, 'step')}", file=INDEX_FILE))
    if record.end is not None:
        found.append(Fact(f"the run ended at {_clock(record.end.at)}: {record.reason}", file=INDEX_FILE))
    elif record.pid is not None:
        found.append(Fact(f"process {record.pid} has the run", file=LOCK_FILE))
    else:
        found.append(Fact("no process on this host has the run, and no end is recorded", file=LOCK_FILE))
    return found


def _clock(at: float) -> str:
    return time.strftime("%H:%M:%S", time.gmtime(at)) + "Z"


def _next_command(record: RunRecord) -> str:
    return {
        RunState.FINISHED: "Nothing to do.",
        RunState.RUNNING: f"Nothing to do. `lockstep top {record.folder}` shows what each process is doing.",
        RunState.INTERRUPTED: f"To continue: lockstep train --resume {record.folder}",
        RunState.FAILED: f"Then continue: lockstep train --resume {record.folder}",
        RunState.KILLED: f"Continue: lockstep train --resume {record.folder}",
    }[record.state]


def _open_incident(record: RunRecord) -> Verdict | None:
    """Returns the stored verdict of the last attempt's newest incident that has no end; None if there is none."""
    for each in reversed(record.unrecovered):
        if each.folder:
            try:
                return parse_verdict(read_json(Path(record.folder) / each.folder / "verdict.json"))
            except (OSError, ValueError):
                return None
    return None


def _verdict_of_end(record: RunRecord, logs: Verdict | None, facts: tuple[Fact, ...]) -> Verdict:
    """Returns the verdict about a run that failed or was killed.

    The class comes from an incident that was not recovered, else from the logs; a run without an end and without
    either was killed from outside.
    """
    recorded = _open_incident(record)
    base = recorded or (logs if logs is not None and logs.cause not in _NO_CAUSE else None)
    explanation = " ".join(_sentences(record))
    if base is None and record.state is RunState.KILLED:
        return Verdict(
            kind=VerdictKind.DEAD,
            level=VerdictLevel.NOTICE,
            culprits=(Culprit(None, role="controller"),),
            cause="external_kill",
            confidence=_KILLED,
            alternatives=(Alternative("host_oom", round(1 - _KILLED, 2)),),
            evidence=facts,
            explanation=explanation,
            fix=_next_command(record),
            collect=("the kernel log of the controller's host (dmesg -T | grep -iE 'oom|killed process')",),
        )
    if base is None:
        base = Verdict(VerdictKind.DEAD, VerdictLevel.CONFIRMED, confidence=0.5)
    culprit = _raising_reward(record)
    return replace(
        base,
        kind=VerdictKind.DEAD if base.kind is VerdictKind.UNKNOWN else base.kind,
        culprits=(culprit,) if culprit is not None else base.culprits,
        evidence=(*facts[-1:], *(_in_run(each) for each in base.evidence), *facts[:-1]),
        explanation=explanation,
        fix=f"{_reward_fix(culprit) or base.fix} {_next_command(record)}".strip(),
        collect=() if culprit is not None else base.collect,
    )


def _in_run(fact: Fact) -> Fact:
    """Names a log of the run with its folder."""
    return replace(fact, file=f"logs/{fact.file}") if fact.file and fact.line is not None else fact


def _raising_reward(record: RunRecord) -> Culprit | None:
    found = _RAISED_BY_REWARD.search(record.reason)
    return None if found is None else Culprit(None, role="reward", where=f"{found['function']}() of {found['path']}")


def _reward_fix(culprit: Culprit | None) -> str:
    return "" if culprit is None else f"Correct the reward function {culprit.where}."


def outcome_json(record: RunRecord) -> dict[str, Any]:
    """Returns the outcome for `--json`."""
    return {
        "name": record.name,
        "recipe": record.recipe,
        "state": str(record.state),
        "reason": record.reason or None,
        "steps": {"done": record.done, "wanted": record.wanted},
        "attempt": record.generation,
        "incidents": [each.json() for each in record.incidents],
        "results": dict(record.results),
    }


def record_text(record: RunRecord) -> str:
    """Returns the text of a bundle's record."""
    return json.dumps(record.json(), indent=1, ensure_ascii=False) + "\n"
