"""Draws curves as inline SVG.

The colours come from the page's style sheet, so that they follow light and dark mode.
"""

import io
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, MultipleLocator, NullLocator

from lockstep.base.text import format_duration

Series = Sequence[tuple[float, float]]
"""(step, value) pairs."""

# Placeholder colours, replaced by CSS variables in the finished SVG.
_INK, _GRID = "#0a0b0c", "#0a0b0d"
_LINES = ("#0a0c01", "#0a0c02", "#0a0c03", "#0a0c04", "#0a0c05", "#0a0c06")
_HARMLESS, _BAD = "#0a0d01", "#0a0d02"
_VARIABLES = {_INK: "var(--muted)", _GRID: "var(--line)", _HARMLESS: "var(--warn)", _BAD: "var(--bad)"} | {
    colour: f"var(--series-{index + 1})" for index, colour in enumerate(_LINES)
}
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.size": 9.5,
    "axes.edgecolor": _GRID,
    "axes.labelcolor": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.axisbelow": True,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "ytick.major.size": 0,
    "xtick.major.size": 3,
    "grid.color": _GRID,
    "grid.linewidth": 0.8,
}
_MIN_SMOOTHED_POINTS = 40
"""Curves with at least this many points are also drawn smoothed, unless they are in _EXACT_METRICS."""
_MAX_POINTS = 1000
"""Most points per curve: a card is about 500 pixels wide."""
_EXACT_METRICS = frozenset({"policy/lr", "steps"})
_MAX_LABELLED = 20
"""Charts with more marks show no numbers at them."""
_TICK_STEPS_S = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400)
"""Tick spacings of a time axis, in seconds."""


@dataclass(frozen=True, slots=True)
class Chart:
    """One card of the report."""

    title: str
    names: tuple[str, ...]
    """Metrics drawn together; those that the run does not have are left out."""
    unit: str = ""
    log: bool = False
    """Whether the axis is logarithmic if the values span more than a decade."""
    bounded: bool = False
    """Whether the values are shares, so that the axis runs from 0 to 1."""
    wide: bool = False
    """Whether the chart is as wide as the page."""
    clock: bool = False
    """Whether the x axis is time in seconds instead of steps."""


@dataclass(frozen=True, slots=True)
class ChartMark:
    """An event on a chart's axis."""

    at: float
    until: float
    """End of the event; the same as `at` if it has no duration on this axis."""
    label: str
    harmless: bool


@dataclass(frozen=True, slots=True)
class DrawnChart:
    title: str
    unit: str
    legend: list[tuple[str, int, str]]
    """Name, colour number from 1, last value."""
    svg: str


def draw_chart(
    chart: Chart, curves: Mapping[str, Series], labels: Mapping[str, str] | None = None, marks: Sequence[ChartMark] = ()
) -> DrawnChart | None:
    """Draws the chart as SVG; returns None if the run has none of its metrics. Non-finite points leave a gap."""
    present = [name for name in chart.names if any(math.isfinite(value) for _, value in curves.get(name, ()))]
    if not present:
        return None
    with mpl.rc_context({**_STYLE, "svg.hashsalt": ascii(chart.title)}):
        figure = Figure(figsize=(11.2, 2.1) if chart.wide else (5.4, 2.25))
        FigureCanvasSVG(figure)
        left = 0.045 if chart.wide else 0.1
        axes = figure.add_axes((left, 0.13, 0.985 - left, 0.8 if chart.wide else 0.82))
        for index, name in enumerate(present):
            _curve(axes, thinned(curves[name]), _LINES[index % len(_LINES)], smooth=name not in _EXACT_METRICS)
        axes.grid(axis="y")
        axes.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True))
        axes.margins(x=0.015)
        if chart.clock:
            _clock_axis(axes)
        _scale(axes, chart, [value for name in present for _, value in curves[name] if math.isfinite(value)])
        _draw_marks(axes, marks)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    legend = [
        (
            (labels or {}).get(name, name.split("/")[-1].replace("_", " ")),
            index % len(_LINES) + 1,
            _last_value(curves[name]),
        )
        for index, name in enumerate(present)
    ]
    return DrawnChart(chart.title, chart.unit, legend, _inline(buffer.getvalue()))


def thinned(points: Series, most: int = _MAX_POINTS) -> list[tuple[float, float]]:
    """Reduces a curve to at most `most` points by taking means of neighbours. Means that are not finite are kept."""
    if len(points) <= most:
        return list(points)
    parts = np.array_split(np.array(points, dtype=np.float64), most)
    return [(float(part[:, 0].mean()), float(part[:, 1].mean())) for part in parts]


def smoothed(points: Series) -> list[tuple[float, float]]:
    """Smooths a curve with a Gaussian window whose width is a thirtieth of the curve. Unlike a moving average, the
    result does not lag behind. Skips non-finite points."""
    finite = np.array([point for point in points if math.isfinite(point[1])], dtype=np.float64).reshape(-1, 2)
    if not len(finite):
        return []
    sigma = max(1.0, len(finite) / 30)
    offsets = np.arange(-math.ceil(3 * sigma), math.ceil(3 * sigma) + 1)
    window = np.exp(-0.5 * (offsets / sigma) ** 2)
    sums = np.convolve(finite[:, 1], window)[len(offsets) // 2 :][: len(finite)]
    weights = np.convolve(np.ones(len(finite)), window)[len(offsets) // 2 :][: len(finite)]
    return list(zip(finite[:, 0].tolist(), (sums / weights).tolist(), strict=True))


def _scale(axes: Any, chart: Chart, values: list[float]) -> None:
    if chart.log and min(values) > 0 and max(values) > 10 * min(values):
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(numticks=5))
        axes.yaxis.set_minor_locator(NullLocator())
    elif chart.bounded:
        axes.set_ylim(-0.03, 1.03)
        axes.yaxis.set_major_locator(FixedLocator([0, 0.25, 0.5, 0.75, 1]))
    else:
        axes.yaxis.set_major_locator(MaxNLocator(nbins=4))
    axes.yaxis.set_major_formatter(FuncFormatter(_tick))


def _clock_axis(axes: Any) -> None:
    first, last = axes.get_xlim()
    spacing = next((each for each in _TICK_STEPS_S if (last - first) / each <= 12), _TICK_STEPS_S[-1])
    axes.xaxis.set_major_locator(MultipleLocator(spacing) if last - first < 12 * spacing else MaxNLocator(nbins=7))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: format_duration(value) if value > 0 else "0"))


def _draw_marks(axes: Any, marks: Sequence[ChartMark]) -> None:
    """Draws a line at the start of each event, a band for its duration, and its number above."""
    for mark in marks:
        colour = _HARMLESS if mark.harmless else _BAD
        if mark.until > mark.at:
            axes.axvspan(mark.at, mark.until, color=colour, alpha=0.16, linewidth=0, zorder=0)
        axes.axvline(mark.at, color=colour, linewidth=1.0, linestyle=(0, (3, 2)), zorder=1)
        if len(marks) <= _MAX_LABELLED:
            axes.annotate(
                mark.label, (mark.at, 1), (3, -1), xycoords=("data", "axes fraction"), textcoords="offset points",
                va="top", color=colour, fontsize=8.5, fontweight="bold", annotation_clip=False,
            )  # fmt: skip


def _tick(value: float, _: object) -> str:
    if value == 0:
        return "0"
    if 1e-3 <= abs(value) < 1e4:
        return f"{value:.4g}"
    if 1e4 <= abs(value) < 1e6:
        return f"{value / 1000:.4g}k"
    mantissa, _, exponent = f"{value:.1e}".partition("e")
    return f"{float(mantissa):g}e{int(exponent)}"


def _curve(axes: Any, points: Series, colour: str, smooth: bool) -> None:
    steps, values = [step for step, _ in points], [value for _, value in points]
    if not smooth or len(points) < _MIN_SMOOTHED_POINTS:
        marker = "o" if len(points) <= 30 else None
        axes.plot(steps, values, color=colour, linewidth=1.8, marker=marker, markersize=3.2, solid_capstyle="round")
        return
    axes.plot(steps, values, color=colour, linewidth=0.9, alpha=0.28)
    mean = smoothed(points)
    axes.plot([s for s, _ in mean], [v for _, v in mean], color=colour, linewidth=2.0, solid_capstyle="round")


def _last_value(points: Series) -> str:
    value = next((value for _, value in reversed(points) if math.isfinite(value)), math.nan)
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def _inline(svg: str) -> str:
    """Returns only the <svg> element, without a fixed size, with colours from the page's style sheet."""
    svg = svg[svg.index("<svg") :]
    for colour, variable in _VARIABLES.items():
        svg = svg.replace(colour, variable)
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(<svg[^>]*?) (?:width|height)="[^"]*"', r"\1", svg)
    svg = re.sub(r'(<svg[^>]*?) (?:width|height)="[^"]*"', r"\1", svg)
    return re.sub(r"font: ([0-9.]+)px [^;\"]*", r"font-size: \1px", svg)
