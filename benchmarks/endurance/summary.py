"""The tables of docs/endurance.md."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.comparison_table import markdown, markdown_head
from benchmarks.endurance.watching import grown
from lockstep.base.text import count_noun

Row = Mapping[str, Any]


def summary(lines: Sequence[Row]) -> list[str]:
    """What the lines of a record say: totals, a table of faults, and the failures."""
    done = [line for line in lines if "faults" in line]
    if not done:
        return ["Nothing has been measured yet."]
    return [*totals(lines, done), "", *fault_table(done), "", *failure_list(done)]


def totals(lines: Sequence[Row], done: Sequence[Row]) -> list[str]:
    faults = [fault for line in done for fault in line["faults"]]
    made = [fault for fault in faults if not fault["skipped"]]
    whole = [line for line in done if "difference" in line]
    shares = [line["steps"] * line["step_s"] / line["span_s"] for line in whole if "step_s" in line]
    processes = sum(len(line["growth"]) + len(line["calm"]["growth"]) for line in whole)
    growing = sum(len(grown(line["growth"], line["calm"]["growth"])) for line in whole)
    bitwise = sum(line["difference"] == 0 for line in whole)
    steps, lost = (sum(line[name] for line in whole) for name in ("steps", "lost_steps"))
    not_here = sum("skipped" in line for line in lines)
    machines = {line["made"]["cpu"]: line["made"]["cores"] for line in lines if "made" in line}
    rows = [
        ("wall time, with the undisturbed runs", f"{sum(line['wall_s'] for line in done) / 3600:.2f} h"),
        ("machines", ", ".join(f"{cpu} ({cores} cores)" for cpu, cores in machines.items())),
        ("load average at the end of an episode", _range(line["load"] for line in done)),
        ("runs with faults", f"{len(done)}, {len(whole)} of them to their end"),
        ("runs that cannot be made on the machine", str(not_here)),
        ("faults", f"{len(made)}, and {len(faults) - len(made)} skipped"),
        ("steps lost or done twice", f"{lost} of {steps}"),
        ("weights bitwise those of the undisturbed run", f"{bitwise} of {len(whole)} runs"),
        ("largest relative difference of a tensor", f"{max((line['difference'] for line in whole), default=0.0):.1e}"),
        ("confirmed verdicts on innocent processes", f"{sum(len(line['false_alarms']) for line in whole)}"),
        ("processes and folders left behind", f"{sum(line['orphans'] for line in whole)}"),
        ("processes that grew over the last half of their run", f"{growing} of {processes}"),
        ("share of the time that trains, one fault in ten steps", _range(shares, percent=True)),
    ]  # fmt: skip
    return [*markdown_head("what", "found"), *(markdown(*row) for row in rows)]


def fault_table(done: Sequence[Row]) -> list[str]:
    """One row for each kind of fault."""
    out = markdown_head(
        "fault", "made", "skipped", "named after, median", "longest", "two more steps after, median", "longest"
    )
    faults = [fault for line in done for fault in line["faults"]]
    for name in sorted({fault["fault"] for fault in faults}):
        mine = [fault for fault in faults if fault["fault"] == name]
        made = [fault for fault in mine if not fault["skipped"]]
        named = [fault["named_s"] for fault in made if fault["named_s"] is not None and _in_time(fault)]
        back = [fault["back_s"] for fault in made if fault["back_s"] is not None]
        out.append(markdown(name, str(len(made)), str(len(mine) - len(made)), *_middle(named), *_middle(back)))
    reasons = sorted({f"{fault['fault']}: {fault['skipped']}" for fault in faults if fault["skipped"]})
    return [*out, *(["", "Skipped: " + "; ".join(reasons) + "."] if reasons else [])]


def _in_time(fault: Row) -> bool:
    """Whether a verdict can be about this fault. The first lines of the file have some about later ones."""
    return fault["back_s"] is None or bool(fault["named_s"] <= fault["back_s"] + 15)


def failure_list(done: Sequence[Row]) -> list[str]:
    """What was not as expected."""
    failures = [(line, failure) for line in done for failure in line["failures"]]
    if not failures:
        return ["Every expectation was met."]
    return [
        f"{count_noun(len(failures), 'expectation')} not met:", "",
        *(f"- episode {line['episode']} ({line['variant']}): {each['expectation']}; found: "
          + " ".join(each["found"].split())[:300] for line, each in failures),
    ]  # fmt: skip


def _middle(seconds: Sequence[float]) -> tuple[str, str]:
    if not seconds:
        return "", ""
    return f"{statistics.median(seconds):.1f} s", f"{max(seconds):.1f} s"


def _range(values: Iterable[float], percent: bool = False) -> str:
    found = sorted(values)
    if not found:
        return ""
    form = "{:.0%}" if percent else "{:.1f}"
    middle = form.format(statistics.median(found))
    return f"{form.format(found[0])} to {form.format(found[-1])}, median {middle}"
