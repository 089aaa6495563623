"""`report.html`: a run on one page that needs nothing else, to be read, mailed and kept."""

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from lockstep.ledger import EvaluationRow, Ledger, MetricsRow, Sample
from lockstep.ledger.files import replace
from lockstep.report.charts import Chart, Drawn, Mark, draw
from lockstep.report.console import number
from lockstep.report.incidents import Incident, Moment, in_words, incidents_of, odd_environment
from lockstep.report.summary import METRIC, stage_seconds, total_tokens, versions, what_was_done
from lockstep.report.timeline import PROGRESS, Timeline
from lockstep.report.top import duration
from lockstep.watch.secrets import redact

CHARTS = (
    Chart("Exact match on held-out prompts", (METRIC,), "share", bounded=True),
    Chart("Reward", ("reward/mean", "reward/std"), "per completion"),
    Chart("Loss", ("policy/loss",), "policy"),
    Chart("KL to the reference", ("policy/kl",), "nats per token"),
    Chart("Entropy", ("policy/entropy",), "nats per token"),
    Chart("Completion length", ("rollout/length_mean", "rollout/length_max"), "tokens"),
    Chart("Clipped tokens", ("policy/clip_low", "policy/clip_high"), "share"),
    Chart("Gradient norm", ("policy/grad_norm",), "before clipping", log=True),
    Chart("Wasted", ("rollout/truncated", "rollout/groups_without_signal"), "share", bounded=True),
    Chart("Log-probability gap", ("policy/engine_gap_mean", "policy/engine_gap_max"), "engine, trainer", log=True),
    Chart("Throughput", ("throughput/tokens_per_s",), "tokens per second"),
)  # fmt: skip
_TERM = re.compile(r"reward/(.+)/mean")
_LABELS = {
    "reward/std": "std",
    "policy/clip_low": "low",
    "policy/clip_high": "high",
    "rollout/length_mean": "mean",
    "rollout/length_max": "max",
    "policy/engine_gap_mean": "mean",
    "policy/engine_gap_max": "max",
}
_REST = 24
"""At most so many further metrics get a curve of their own."""


@dataclass(frozen=True, slots=True)
class Tile:
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
class Shown:
    """An incident as it is listed, under the number that it has on the charts."""

    number: int
    incident: Incident
    clock: str
    step: int
    """Under way when it began, counted from 1."""
    moments: list[tuple[str, Moment]]
    """With the time since it began."""
    environment: list[str]
    """What was odd about the environment of its processes."""


@dataclass(frozen=True, slots=True)
class Pair:
    """The same prompt before and after training."""

    before: Sample | None
    after: Sample | None

    @property
    def shown(self) -> Sample:
        sample = self.after or self.before
        assert sample is not None
        return sample


def write_report(ledger: Ledger, exit_reason: str = "") -> Path:
    """Writes `report.html` into the run's folder, whole or not at all; `ledger` may be a reader."""
    path = ledger.folder / "report.html"
    replace(path, render(ledger, exit_reason).encode("utf-8", "replace"))
    return path


def render(ledger: Ledger, exit_reason: str = "") -> str:
    """The page. Whatever comes from data or models is escaped."""
    config = ledger.config()
    rows, evaluations = what_was_done(ledger)
    reason = exit_reason or _reason(ledger)
    curves = curves_of(rows, evaluations)
    incidents = incidents_of(ledger.events())
    timeline = Timeline(ledger, incidents)
    marks = timeline.over_steps()
    return _environment().get_template("report.html.j2").render(
        name=config.get("name", ledger.folder.name),
        recipe=str(config.get("recipe", "")).upper(),
        model=config.get("model", {}).get("path", ""),
        reason=reason,
        finished=reason == "finished",
        tiles=_tiles(ledger, rows, evaluations, incidents),
        charts=[_card(chart, curves, marks) for chart in _charts(curves)],
        more=[_card(chart, curves, marks) for chart in _rest(curves)],
        stages=_stages(rows),
        incidents=_shown(incidents, timeline, ledger.folder),
        progress=_card(PROGRESS, {"steps": timeline.curve()}, timeline.over_time()) if incidents else None,
        evaluations=_ends(evaluations),
        pairs=_pairs(evaluations),
        config=yaml.safe_dump(redact(config), sort_keys=False, allow_unicode=True),
        events=[(_clock(event.at), event.kind, _fields(event.fields)) for event in ledger.events()],
        versions=versions(),
        written=_clock(time.time()),
        folder=str(ledger.folder),
    )  # fmt: skip


def curves_of(rows: list[MetricsRow], evaluations: list[EvaluationRow]) -> dict[str, list[tuple[float, float]]]:
    """Points by metric; x is the number of steps done (step 0's metrics are at 1, the first evaluation at 0)."""
    curves: dict[str, dict[float, float]] = {}
    for row in rows:
        for name, value in row.values.items():
            curves.setdefault(name, {})[row.step + 1] = value
    for evaluation in evaluations:
        for name, value in evaluation.metrics.items():
            curves.setdefault(name, {})[evaluation.step + 1] = value
    return {name: sorted(points.items()) for name, points in curves.items()}


def _charts(curves: Mapping[str, Any]) -> list[Chart]:
    terms = tuple(name for name in curves if _TERM.fullmatch(name))
    reward = [Chart("Reward by term", terms, "before weights")] if terms else []
    return [*CHARTS[:2], *reward, *CHARTS[2:]]


def _rest(curves: Mapping[str, Any]) -> list[Chart]:
    used = {name for chart in _charts(curves) for name in chart.names}
    names = [name for name in curves if name not in used and name not in ("time/step_s", "tokens/total")]
    return [Chart(name, (name,)) for name in names[:_REST]]


def _card(chart: Chart, curves: Mapping[str, Any], marks: Sequence[Mark]) -> tuple[Drawn, Markup] | None:
    terms = {name: found[1] for name in chart.names if (found := _TERM.fullmatch(name))}
    drawn = draw(chart, curves, {**_LABELS, **terms}, marks)
    # matplotlib escapes text; what it draws here are numbers only.
    return None if drawn is None else (drawn, Markup(drawn.svg))


def _shown(incidents: list[Incident], timeline: Timeline, run: Path) -> list[Shown]:
    return [
        Shown(
            number,
            each,
            _clock(each.began),
            timeline.step(each.began),
            [(f"+{moment.at - each.began:.1f} s", moment) for moment in each.moments],
            odd_environment(run / each.folder) if each.folder else [],
        )
        for number, each in enumerate(incidents, 1)
    ]


def _tiles(
    ledger: Ledger, rows: list[MetricsRow], evaluations: list[EvaluationRow], incidents: list[Incident]
) -> list[Tile]:
    tiles = []
    exact = [row.metrics[METRIC] for row in evaluations if METRIC in row.metrics]
    if exact:
        note = f"from {number(exact[0])}, best {number(max(exact))}" if len(exact) > 1 else ""
        tiles.append(Tile("exact match", number(exact[-1]), note))
    rewards = [row.values["reward/mean"] for row in rows if "reward/mean" in row.values]
    if rewards:
        tiles.append(Tile("reward", number(rewards[-1]), f"from {number(rewards[0])}"))
    losses = [row.values["policy/loss"] for row in rows if "policy/loss" in row.values]
    if losses and not rewards:
        tiles.append(Tile("loss", number(losses[-1]), f"from {number(losses[0])}"))
    wanted = ledger.config().get("steps")
    tiles.append(Tile("steps", f"{ledger.done():,}", f"of {wanted:,}" if wanted else ""))
    if tokens := total_tokens(rows):
        tiles.append(Tile("tokens", _short(tokens)))
    if seconds := sum(stage_seconds(rows).values()):
        tiles.append(Tile("time in stages", duration(seconds), f"{duration(seconds / max(len(rows), 1))} per step"))
    if incidents:
        tiles.append(Tile("incidents", f"{len(incidents)}", in_words(incidents).partition(", ")[2]))
    return tiles


def _stages(rows: list[MetricsRow]) -> list[StageShare]:
    seconds = stage_seconds(rows)
    total = sum(seconds.values())
    if total <= 0:
        return []
    return [
        StageShare(name, duration(spent), duration(spent / len(rows)), 100 * spent / total, index % 6 + 1)
        for index, (name, spent) in enumerate(seconds.items())
    ]


def _ends(evaluations: list[EvaluationRow]) -> tuple[int, int] | None:
    """Steps done at the first and the last evaluation that have samples."""
    sampled = [row.step + 1 for row in evaluations if row.samples]
    return (sampled[0], sampled[-1]) if sampled else None


def _pairs(evaluations: list[EvaluationRow]) -> list[Pair]:
    """Samples of the first and last evaluation, side by side where the prompt is the same."""
    sampled = [row for row in evaluations if row.samples]
    if not sampled:
        return []
    if len(sampled) == 1:
        return [Pair(None, sample) for sample in sampled[0].samples]
    before = {sample.uid or sample.prompt: sample for sample in sampled[0].samples}
    pairs = [Pair(before.pop(sample.uid or sample.prompt, None), sample) for sample in sampled[-1].samples]
    return [*pairs, *(Pair(sample, None) for sample in before.values())]


def _reason(ledger: Ledger) -> str:
    """How the newest attempt ended, if it did: a report may be written while the run goes on."""
    ends = [event for event in ledger.events() if event.kind == "end" and event.generation == ledger.generation]
    return str(ends[-1].fields["reason"]) if ends else "still running, or killed"


def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("lockstep.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["number"] = number
    return environment


def _short(count: int) -> str:
    for size, letter in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**4, "k")):
        if count >= size:
            return f"{count / (1000 if letter == 'k' else size):.3g} {letter}"
    return f"{count:,}"


def _fields(fields: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}: {value}" for key, value in fields.items())


def _clock(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
