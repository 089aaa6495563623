"""Chooses completions of a step for people to read, and reads them from the folder of a run."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from lockstep.data.samples import Completion, Group, Rollouts
from lockstep.ledger.errors import LedgerError, StepCorrupt
from lockstep.ledger.ledger import Ledger
from lockstep.ledger.sqlite_index import CompletionSample
from lockstep.ledger.step_file import completion_images

SampleOrder = Literal["spread", "best", "worst"]
"""Which completions of a step: from best to worst at even distances, the best first, or the worst first."""


class NoSamples(LedgerError):
    """A run has no completions of a step to show. Nothing was changed."""

    def __init__(self, run: Path, problem: str) -> None:
        super().__init__(f"{run}: {problem}")
        self.run, self.problem = run, problem


@dataclass(frozen=True, slots=True)
class StepSamples:
    """Completions of one step of a run."""

    number: int
    """The number of the step, from 1."""
    samples: list[CompletionSample]
    total: int
    """The number of completions in the step."""
    file: Path | None
    """The step file; None if it is deleted, so that only the samples that the run kept are left."""
    version: int | None = None
    """The version of the weights that generated them; None if the step file is deleted."""


def choose_samples(groups: Sequence[Group], count: int, order: SampleOrder = "spread") -> list[CompletionSample]:
    """Chooses `count` completions by their rewards. Equal rewards, and groups without any, are in the order of the
    data."""
    places = [(group, number) for group in groups for number in range(len(group.completions))]
    rewards = [-np.inf if group.rewards is None else group.rewards[number] for group, number in places]
    ranked = np.argsort(-np.asarray(rewards, np.float64), kind="stable")
    return [_sample(*places[index]) for index in _select(ranked.tolist(), count, order)]


def read_samples(ledger: Ledger, number: int | None, count: int, order: SampleOrder) -> StepSamples:
    """Reads completions of a step of a run that may be in progress.

    Args:
        number: the step, from 1; the newest when None.

    Raises:
        NoSamples: the run has none of this step.
        StepCorrupt: the step file is damaged.
    """
    steps, kept_steps = ledger.stored_steps(), ledger.sampled_steps()
    if number is None:
        if not steps:
            raise NoSamples(ledger.folder, _why_no_steps(ledger))
        step = steps[-1]
    else:
        step = number - 1
    if step in steps and (rollouts := _read_rollouts(ledger, step)) is not None:
        groups = rollouts.groups
        total = sum(len(group.completions) for group in groups)
        chosen = choose_samples(groups, count, order)
        return StepSamples(step + 1, chosen, total, ledger.step_path(step), rollouts.version)
    if step in kept_steps and (rows := ledger.samples(step)):
        kept = rows[0].samples
        rewards = [-np.inf if sample.reward is None else sample.reward for sample in kept]
        ranked = np.argsort(-np.asarray(rewards), kind="stable").tolist()
        chosen = [kept[index] for index in _select(ranked, count, order)]
        return StepSamples(step + 1, chosen, ledger.completions_of(step), None)
    if not steps and not kept_steps:
        raise NoSamples(ledger.folder, _why_no_steps(ledger))
    raise NoSamples(ledger.folder, _why_not(step + 1, [each + 1 for each in steps], [each + 1 for each in kept_steps]))


def image_digests(ledger: Ledger) -> set[str]:
    """Returns the digests of the images that the stored steps' environments answered with, and those of the samples
    that the run keeps. Raises StepCorrupt."""
    kept = [each for row in ledger.samples() for each in row.samples]
    kept += [each for row in ledger.evaluations() for each in row.samples]
    shown = {str(image["digest"]) for sample in kept for image in sample.images}
    return shown.union(*(completion_images(ledger.step_path(step), step) for step in ledger.stored_steps()))


def ranges_text(numbers: Sequence[int]) -> str:
    """Describes sorted numbers: `1, 5, 9 to 12`."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ", ".join(str(first) if first == last else f"{first} to {last}" for first, last in parts)


def _select(ranked: list[int], count: int, order: SampleOrder) -> list[int]:
    if order == "best":
        return ranked[:count]
    if order == "worst":
        return ranked[::-1][:count]
    places = np.linspace(0, len(ranked) - 1, min(count, len(ranked))).round().astype(int)
    return [ranked[place] for place in places.tolist()]


def _sample(group: Group, number: int) -> CompletionSample:
    completion: Completion = group.completions[number]
    return CompletionSample(
        prompt=group.prompt.text,
        completion=completion.text,
        answer=group.prompt.answer,
        reward=None if group.rewards is None else float(group.rewards[number]),
        scores={name: float(values[number]) for name, values in group.breakdown.items()},
        uid=group.prompt.uid,
        finish=completion.finish,
        messages=None if completion.episode is None else completion.episode.messages,
        number=number,
        images=[image.description() for image in (*group.prompt.images, *completion.images)],
    )


def _read_rollouts(ledger: Ledger, step: int) -> Rollouts | None:
    """The rollouts of a step file; None if a run in progress has deleted it since it was listed."""
    try:
        stored = ledger.stored_step(step)
    except StepCorrupt:
        if step in ledger.stored_steps():
            raise
        return None
    return None if stored is None else stored.rollouts


def _why_no_steps(ledger: Ledger) -> str:
    recipe = ledger.config().get("recipe")
    if recipe == "sft" or ledger.last_committed_step() >= 0:
        return f"the recipe {recipe} generates no completions"
    return "no step has all its completions yet"


def _why_not(number: int, steps: Sequence[int], kept: Sequence[int]) -> str:
    others = sorted(set(kept) - set(steps))
    there = f"there are step files of {ranges_text(steps)}" if steps else "there are no step files"
    more = f", and a few samples of {ranges_text(others)}" if others else ""
    why = "is not complete yet" if steps and number > steps[-1] else "is not there"
    return f"step {number} {why}: {there}{more} (steps count from 1)"
