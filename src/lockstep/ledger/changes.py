"""What differs between two configs of a run, and whether it would change the run's result."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_HARMLESS = (
    "name",
    "folder",
    "checkpoint",
    "report",
    "cluster",
    "evaluation.samples_shown",
    "reward.workers",
    "reward.timeout_s",
    "reward.memory_mb",
    "trainer.collective_timeout_s",
)
"""Fields and sections that say where a run lives, what it shows and how long it waits, and not what it computes.
Threads and ranks are not among them: they change the order of additions, so the bits."""


class _Absent:
    """A field that one of the two configs does not have."""

    def __repr__(self) -> str:
        return "(absent)"


ABSENT = _Absent()


@dataclass(frozen=True, slots=True)
class Change:
    path: str
    """Dotted, as on the command line: `trainer.optimizer.lr`."""
    old: Any
    new: Any
    changes_result: bool
    reason: str = ""
    """Why, where it is not plain."""

    def __str__(self) -> str:
        return f"{self.path}: {self.old!r} -> {self.new!r}{f' ({self.reason})' if self.reason else ''}"


def compare_config(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Change]:
    """Every field that differs between two resolved configs (`model_dump(mode="json")`), in their order."""
    changes = []
    for path, before, after in _differences("", old, new):
        if path == "steps":
            changes.append(_steps(before, after, old))
        else:
            harmless = any(path == field or path.startswith(field + ".") for field in _HARMLESS)
            changes.append(Change(path, before, after, not harmless))
    return changes


def _steps(before: Any, after: Any, config: Mapping[str, Any]) -> Change:
    """More steps continue a run, unless the learning rate's schedule is stretched over all of them."""
    schedule = config.get("trainer", {}).get("schedule", {})
    if not (isinstance(before, int) and isinstance(after, int) and after > before):
        return Change("steps", before, after, True, "a run can be made longer, not shorter")
    if schedule.get("kind", "constant") != "constant" and schedule.get("total_steps") is None:
        why = f"the {schedule['kind']} schedule spans the run: only a run with trainer.schedule.total_steps can grow"
        return Change("steps", before, after, True, why)
    return Change("steps", before, after, False)


def _differences(path: str, old: Any, new: Any) -> list[tuple[str, Any, Any]]:
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        keys = [*old, *(key for key in new if key not in old)]
        prefix = f"{path}." if path else ""
        pairs = ((f"{prefix}{key}", old.get(key, ABSENT), new.get(key, ABSENT)) for key in keys)
        return [change for inner, before, after in pairs for change in _differences(inner, before, after)]
    if isinstance(old, list | tuple) and isinstance(new, list | tuple) and len(old) == len(new):
        triples = (
            (f"{path}.{index}", before, after) for index, (before, after) in enumerate(zip(old, new, strict=True))
        )
        return [change for inner, before, after in triples for change in _differences(inner, before, after)]
    same = type(old) is type(new) or {type(old), type(new)} == {int, float} or {type(old), type(new)} == {list, tuple}
    return [] if same and old == new else [(path, old, new)]
