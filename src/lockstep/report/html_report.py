"""Writes `report.html`, a self-contained page about a run: curves, incidents, samples, configuration."""

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from lockstep.base.secrets import redact
from lockstep.base.secure_html import with_strict_policy
from lockstep.base.text import format_duration
from lockstep.ledger import CompletionSample, EvaluationRow, EventRow, Ledger, MetricsRow
from lockstep.ledger.durable_files import replace_file
from lockstep.ledger.metric_blocks import MetricTotals
from lockstep.ledger.run_incidents import (
    Incident,
    IncidentMoment,
    environment_findings,
    incidents_of,
    incidents_summary,
)
from lockstep.report.charts import Chart, ChartMark, DrawnChart, draw_chart
from lockstep.report.communication.communication_table import LOAD_COLUMNS, OPERATION_COLUMNS, report_view
from lockstep.report.device_rows import device_rows, device_spread
from lockstep.report.incident_timeline import IncidentTimeline
from lockstep.report.live_console import format_number
from lockstep.report.run_summary import (
    EXACT_MATCH,
    HELD_OUT_REWARD,
    committed_rows,
    early_stop,
    package_versions,
    parent_of,
    stage_seconds,
    total_tokens,
)
from lockstep.report.sample_pictures import PictureBook

PROGRESS_CHART = Chart("Steps done", ("steps",), "over the time the run was up", wide=True, clock=True)


CHARTS = (
    Chart("Exact match on held-out prompts", (EXACT_MATCH,), "share", bounded=True),
    Chart("Reward on held-out prompts", (HELD_OUT_REWARD,), "per completion"),
    Chart("Reward", ("reward/mean", "reward/std"), "per completion"),
    Chart("Loss", ("policy/loss", "eval/loss"), "training, held-out"),
    Chart("Pair accuracy", ("rewards/accuracies", "policy/accuracy", "eval/accuracy"), "share", bounded=True),
    Chart("Implicit reward", ("rewards/chosen", "rewards/rejected"), "per completion"),
    Chart("Score", ("policy/chosen_reward", "policy/rejected_reward"), "per completion"),
    Chart("Value", ("critic/value_mean", "critic/return_mean"), "per token, before the updates"),
    Chart("Variance that the critic explains", ("critic/explained_variance",), "share"),
    Chart("KL to the reference", ("policy/kl",), "nats per token"),
    Chart("Entropy", ("policy/entropy",), "nats per token"),
    Chart("Completion length", ("rollout/length_mean", "rollout/length_max"), "tokens"),
    Chart("Clipped tokens", ("policy/clip_low", "policy/clip_high"), "share"),
    Chart("Gradient norm", ("policy/grad_norm",), "before clipping", log=True),
    Chart("Wasted", ("rollout/truncated", "rollout/groups_without_signal"), "share", bounded=True),
    Chart("Log-probability gap", ("policy/engine_gap_mean", "policy/engine_gap_max"), "engine, trainer", log=True),
    Chart("Throughput", ("throughput/tokens_per_s",), "tokens per second"),
)  # fmt: skip
_REWARD_TERM = re.compile(r"reward/(.+)/mean")
_LABELS = {
    "reward/std": "std",
    "rewards/chosen": "chosen",
    "rewards/rejected": "rejected",
    "policy/accuracy": "training",
    "eval/accuracy": "held-out",
    "policy/chosen_reward": "chosen",
    "policy/rejected_reward": "rejected",
    "critic/value_mean": "value",
    "critic/return_mean": "return",
    "policy/clip_low": "low",
    "policy/clip_high": "high",
    "rollout/length_mean": "mean",
    "rollout/length_max": "max",
    "policy/engine_gap_mean": "mean",
    "policy/engine_gap_max": "max",
}
_MAX_OTHER_CHARTS = 24
"""Most charts of metrics that are not in CHARTS."""
_MAX_EVENTS = 1000
"""Most events that are listed."""
_MAX_SAMPLED_STEPS = 6
"""Most training steps of which completions are shown."""


@dataclass(frozen=True, slots=True)
class SummaryTile:
    """A number at the top of the page."""

    label: str
    value: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class StageShare:
    name: str
    seconds: str
    per_step: str
    percent: float
    colour: int


@dataclass(frozen=True, slots=True)
class ListedIncident:
    """An incident in the list, with its number on the charts."""

    number: int
    incident: Incident
    clock: str
    step: int
    """The step that was in progress when it began, counted from 1."""
    moments: list[tuple[str, IncidentMoment]]
    """The incident's moments, each with the time since the incident began."""
    environment: list[str]
    """Findings about environment variables of its processes."""


@dataclass(frozen=True, slots=True)
class SamplePair:
    """Completions of the same prompt before and after training."""

    before: CompletionSample | None
    after: CompletionSample | None

    @property
    def shown(self) -> CompletionSample:
        sample = self.after or self.before
        assert sample is not None
        return sample


def write_report(ledger: Ledger, exit_reason: str = "") -> Path:
    """Writes `report.html` into the run's folder atomically. `ledger` may be opened for reading only."""
    path = ledger.folder / "report.html"
    replace_file(path, render_html(ledger, exit_reason).encode("utf-8", "replace"))
    return path


def render_html(ledger: Ledger, exit_reason: str = "") -> str:
    """Renders the page. Text from data or models is escaped, and the page's policy forbids scripts and requests."""
    config = ledger.config()
    rows, evaluations = committed_rows(ledger)
    totals = ledger.metric_totals(ledger.steps_done())
    reason = exit_reason or _exit_reason(ledger)
    curves = metric_curves(rows, evaluations)
    incidents = incidents_of(ledger.events())
    timeline = IncidentTimeline(ledger, incidents)
    marks = timeline.over_steps()
    pictures = PictureBook(config)
    page = _jinja_environment().get_template("report.html.j2").render(
        name=config.get("name", ledger.folder.name),
        recipe=str(config.get("recipe", "")).upper().replace("_", " "),
        model=config.get("model", {}).get("path", ""),
        reason=reason,
        finished=reason == "finished",
        tiles=_tiles(ledger, rows, evaluations, incidents, totals),
        charts=[_card(chart, curves, marks) for chart in _charts(curves)],
        more=[_card(chart, curves, marks) for chart in _other_charts(curves)],
        stages=_stages(totals),
        devices=(devices := device_rows(ledger.folder)),
        spread=device_spread(devices),
        communication=report_view(ledger.folder),
        load_columns=LOAD_COLUMNS,
        operation_columns=OPERATION_COLUMNS,
        incidents=_listed_incidents(incidents, timeline, ledger.folder),
        progress=_card(PROGRESS_CHART, {"steps": timeline.curve()}, timeline.over_time()) if incidents else None,
        evaluations=_sampled_steps(evaluations),
        pairs=_pairs(evaluations),
        samples=_samples_of_steps(ledger),
        pictures=pictures,
        config=yaml.safe_dump(redact(config), sort_keys=False, allow_unicode=True),
        events=_listed_events(ledger.events()),
        parent=parent_of(ledger),
        versions=package_versions(),
        written=_local_time(time.time()),
        folder=str(ledger.folder),
    )  # fmt: skip
    return with_strict_policy(page, pictures=bool(pictures.thumbnails))


def metric_curves(rows: list[MetricsRow], evaluations: list[EvaluationRow]) -> dict[str, list[tuple[float, float]]]:
    """Returns the points of each metric. x is the number of steps done: step 0's metrics are at 1, the first evaluation
    at 0."""
    curves: dict[str, dict[float, float]] = {}
    for row in rows:
        for name, value in row.values.items():
            curves.setdefault(name, {})[row.step + 1] = value
    for evaluation in evaluations:
        for name, value in evaluation.metrics.items():
            curves.setdefault(name, {})[evaluation.step + 1] = value
    return {name: sorted(points.items()) for name, points in curves.items()}


def _charts(curves: Mapping[str, Any]) -> list[Chart]:
    terms = tuple(name for name in curves if _REWARD_TERM.fullmatch(name))
    reward = [Chart("Reward by term", terms, "before weights")] if terms else []
    return [*CHARTS[:3], *reward, *CHARTS[3:]]


def _other_charts(curves: Mapping[str, Any]) -> list[Chart]:
    used = {name for chart in _charts(curves) for name in chart.names}
    names = [name for name in curves if name not in used and name not in ("time/step_s", "tokens/total")]
    return [Chart(name, (name,)) for name in names[:_MAX_OTHER_CHARTS]]


def _card(chart: Chart, curves: Mapping[str, Any], marks: Sequence[ChartMark]) -> tuple[DrawnChart, Markup] | None:
    terms = {name: found[1] for name in chart.names if (found := _REWARD_TERM.fullmatch(name))}
    drawn = draw_chart(chart, curves, {**_LABELS, **terms}, marks)
    # matplotlib escapes text, and only numbers are drawn here.
    return None if drawn is None else (drawn, Markup(drawn.svg))


def _listed_incidents(incidents: list[Incident], timeline: IncidentTimeline, run: Path) -> list[ListedIncident]:
    return [
        ListedIncident(
            number,
            each,
            _local_time(each.began),
            timeline.step(each.began),
            [(f"+{moment.at - each.began:.1f} s", moment) for moment in each.moments],
            environment_findings(run / each.folder) if each.folder else [],
        )
        for number, each in enumerate(incidents, 1)
    ]


def _tiles(
    ledger: Ledger,
    rows: list[MetricsRow],
    evaluations: list[EvaluationRow],
    incidents: list[Incident],
    totals: MetricTotals,
) -> list[SummaryTile]:
    tiles = []
    for title, metric in (("exact match", EXACT_MATCH), ("held-out reward", HELD_OUT_REWARD)):
        values = [row.metrics[metric] for row in evaluations if metric in row.metrics]
        if values:
            note = f"from {format_number(values[0])}, best {format_number(max(values))}" if len(values) > 1 else ""
            tiles.append(SummaryTile(title, format_number(values[-1]), note))
    rewards = [row.values["reward/mean"] for row in rows if "reward/mean" in row.values]
    if rewards:
        tiles.append(SummaryTile("reward", format_number(rewards[-1]), f"from {format_number(rewards[0])}"))
    losses = [row.values["policy/loss"] for row in rows if "policy/loss" in row.values]
    if losses and not rewards:
        tiles.append(SummaryTile("loss", format_number(losses[-1]), f"from {format_number(losses[0])}"))
    accuracies = [
        row.values[name] for row in rows for name in ("rewards/accuracies", "policy/accuracy") if name in row.values
    ]
    if accuracies:
        tiles.append(
            SummaryTile("pair accuracy", format_number(accuracies[-1]), f"from {format_number(accuracies[0])}")
        )
    total_steps = ledger.config().get("steps")
    stopped = f"stopped early: {reason}" if (reason := early_stop(ledger)) else ""
    tiles.append(
        SummaryTile("steps", f"{ledger.steps_done():,}", stopped or (f"of {total_steps:,}" if total_steps else ""))
    )
    if tokens := total_tokens(ledger, ledger.steps_done(), totals):
        tiles.append(SummaryTile("tokens", _short_count(tokens)))
    if seconds := sum(stage_seconds(totals).values()):
        per_step = f"{format_duration(seconds / max(totals.count, 1))} per step"
        tiles.append(SummaryTile("time in stages", format_duration(seconds), per_step))
    if incidents:
        tiles.append(SummaryTile("incidents", f"{len(incidents)}", incidents_summary(incidents).partition(", ")[2]))
    return tiles


_COLOURS = 14
"""Colours in the page's style sheet: more than a run has stages."""


def _stages(totals: MetricTotals) -> list[StageShare]:
    seconds = stage_seconds(totals)
    total = sum(seconds.values())
    if total <= 0:
        return []
    return [
        StageShare(
            name,
            format_duration(spent),
            format_duration(spent / totals.count),
            100 * spent / total,
            colour=index % _COLOURS + 1,
        )
        for index, (name, spent) in enumerate(seconds.items())
    ]


def _sampled_steps(evaluations: list[EvaluationRow]) -> tuple[int, int] | None:
    """Returns the steps done at the first and at the last evaluation with samples."""
    sampled = [row.step + 1 for row in evaluations if row.samples]
    return (sampled[0], sampled[-1]) if sampled else None


def _pairs(evaluations: list[EvaluationRow]) -> list[SamplePair]:
    """Pairs the samples of the first and the last evaluation by prompt."""
    sampled = [row for row in evaluations if row.samples]
    if not sampled:
        return []
    if len(sampled) == 1:
        return [SamplePair(None, sample) for sample in sampled[0].samples]
    before = {sample.uid or sample.prompt: sample for sample in sampled[0].samples}
    pairs = [SamplePair(before.pop(sample.uid or sample.prompt, None), sample) for sample in sampled[-1].samples]
    return [*pairs, *(SamplePair(sample, None) for sample in before.values())]


def _samples_of_steps(ledger: Ledger) -> list[tuple[int, list[CompletionSample]]]:
    """Returns completions of at most `_MAX_SAMPLED_STEPS` trained steps, by the step's number: of the first, of the
    last, and of others at even distances."""
    done = ledger.steps_done()
    steps = [step for step in ledger.sampled_steps() if step < done]
    count = min(len(steps), _MAX_SAMPLED_STEPS)
    chosen = [steps[round(place * (len(steps) - 1) / max(count - 1, 1))] for place in range(count)]
    return [(row.step + 1, row.samples) for row in ledger.samples(chosen)]


def _exit_reason(ledger: Ledger) -> str:
    """Returns how the newest attempt ended. A report may be written while the run continues."""
    ends = [event for event in ledger.events() if event.kind == "end" and event.generation == ledger.generation]
    return str(ends[-1].fields["reason"]) if ends else "still running, or killed"


def _jinja_environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("lockstep.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["number"] = format_number
    return environment


def _short_count(count: int) -> str:
    for size, letter in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**4, "k")):
        if count >= size:
            return f"{count / (1000 if letter == 'k' else size):.3g} {letter}"
    return f"{count:,}"


def _listed_events(events: list[EventRow]) -> list[tuple[str, str, str]]:
    """Returns time, kind and fields of events: of many, of the first and of the last ones."""
    half = _MAX_EVENTS // 2
    shown = events if len(events) <= _MAX_EVENTS else [*events[:half], *events[-half:]]
    listed = [(_local_time(event.at), event.kind, _join_fields(event.fields)) for event in shown]
    if len(shown) < len(events):
        listed.insert(half, ("", f"{len(events) - len(shown):,} events are left out", ""))
    return listed


def _join_fields(fields: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}: {value}" for key, value in fields.items())


def _local_time(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
