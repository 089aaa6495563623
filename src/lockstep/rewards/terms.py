"""From the config's terms to callables over a batch, and from their values to one reward per sample."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from lockstep.config import reward as config
from lockstep.data.samples import Prompt
from lockstep.rewards import signatures, verifiers
from lockstep.rewards.api import Batch, Sample, Scores, Signature
from lockstep.rewards.functions import load
from lockstep.rewards.signatures import Advance
from lockstep.rewards.values import LARGEST, BadReward

SLACK_S = 10.0
"""Beyond the `deadline_s` of a request, after which the term itself should have said what is wrong."""
Verifier = Callable[[Prompt, Sample], float | None]


@dataclass(frozen=True, slots=True)
class Term:
    """A term that is ready to be called."""

    name: str
    function: str
    """What errors call it: the configured path of a user's function, else the kind."""
    signature: Signature | None
    per_sample: bool
    score: Callable[[Batch, Advance], Scores]
    """Raises BadReward."""
    limit_s: float = 0.0
    """Longest time without a finished sample that it allows for; 0 where it has no limit of its own."""


def names(terms: Sequence[config.Term]) -> list[str]:
    """What the terms are called in the metrics: unique, in order, known without loading anything."""
    found: list[str] = []
    for term in terms:
        name = term.name or (term.path.rpartition(":")[2] if isinstance(term, config.Function) else term.kind)
        taken = sum(each == name or each.startswith(f"{name}_") for each in found)
        found.append(name if name not in found else f"{name}_{taken + 1}")
    return found


def build(term: config.Term, name: str, base: Path = Path(), concurrency: int = 1) -> Term:
    """The term as a callable. Raises TermError for one that cannot be used."""
    if isinstance(term, config.Function):
        function = load(term.path, term.signature, dict(term.arguments), base)
        call = partial(signatures.ADAPTERS[function.signature], function)
        return Term(name, term.path, function.signature, function.signature == "verl", call)
    if isinstance(term, config.Http | config.Judge):
        return _remote(term, name, concurrency)
    verifier = _verifier(term, base)
    return Term(name, term.kind, None, True, partial(_each, verifier, isinstance(term, config.Math)))


def _remote(term: config.Http | config.Judge, name: str, concurrency: int) -> Term:
    """Imported only here: clients and templates take a scorer half a second that most runs need not spend."""
    if isinstance(term, config.Http):
        from lockstep.rewards.remote import Remote

        asks: Callable[[Batch, Advance], Scores] = Remote(term, name, concurrency).score
    else:
        from lockstep.rewards.judge import Judged

        asks = Judged(term, name, concurrency).score
    return Term(name, term.kind, None, term.kind == "judge", asks, term.deadline_s + SLACK_S)


def weighted_sum(values: Sequence[np.ndarray], weights: Sequence[float]) -> np.ndarray:
    """The reward of each sample, float32 `[samples]`: the sum of weight times value (float64 `[samples]` each) over
    the terms that apply to it, which are those where the value is not NaN. Raises BadReward for a sample to which
    no term applies, or whose sum leaves float32."""
    table = np.stack([np.asarray(each, np.float64) for each in values])
    applies = ~np.isnan(table)
    for position in np.flatnonzero(~applies.any(axis=0)):
        raise BadReward("no term applies to this sample: each returned None", int(position))
    total = np.where(applies, table * np.asarray(weights, np.float64)[:, None], 0.0).sum(axis=0)
    for position in np.flatnonzero(~(np.abs(total) <= LARGEST)):
        raise BadReward(f"the weighted sum {total[position]} is not finite in float32", int(position))
    rewards: np.ndarray = total.astype(np.float32)
    return rewards


Local = (
    config.ExactMatch
    | config.Math
    | config.Regex
    | config.Length
    | config.JsonSchema
    | config.EnvironmentReward
    | config.TaskReward
)
"""Terms that look at one completion and ask nobody."""


def _verifier(term: Local, base: Path) -> Verifier:
    match term:
        case config.JsonSchema():
            return _fits_schema(term, base)
        case config.ExactMatch(ignore_case=fold, extract=extract):
            return lambda prompt, sample: verifiers.exact_match(sample.text, _answer(prompt), fold, extract)
        case config.Math(numeric_tolerance=tolerance):
            return lambda prompt, sample: verifiers.math_equal(sample.text, _answer(prompt), tolerance)
        case config.Regex(pattern=pattern, mode=mode):
            return lambda prompt, sample: verifiers.regex_match(sample.text, pattern, mode)
        case config.Length(soft=soft, hard=hard):
            return lambda prompt, sample: verifiers.overlong_penalty(sample.generated, soft, hard)
        case config.EnvironmentReward():
            return lambda prompt, sample: _of_environment(sample)
        case config.TaskReward(extract=extract):
            return lambda prompt, sample: _of_task(prompt, sample.text, extract)


def _of_environment(sample: Sample) -> float:
    if sample.episode is None:
        raise BadReward("the completion comes from no environment: set rollout.environment")
    return math.fsum(sample.episode.rewards)


def _of_task(prompt: Prompt, text: str, extract: str | None) -> float:
    from lockstep.data.tasks import COLUMN, task_score  # takes seconds to import, for a term that few runs have

    made = prompt.columns.get(COLUMN)
    if made is None:
        raise BadReward("the row is of no task: the term is for data of kind reasoning_gym")
    said = text if extract is None else verifiers.last_match(extract, text)
    return 0.0 if said is None else task_score(made, said.strip())


def _fits_schema(term: config.JsonSchema, base: Path) -> Verifier:
    from lockstep.rewards.schema import Schema, read_schema

    schema = Schema(read_schema(term, base), term.extract, term.partial)
    return lambda prompt, sample: schema.score(sample.text)


def _each(verifier: Verifier, may_be_undecided: bool, batch: Batch, advance: Advance) -> Scores:
    """One sample after the other. What a verifier could not decide is worth nothing, and counted as undecided."""
    found: list[float | None] = []
    for position, (prompt, sample) in enumerate(batch.pairs()):
        try:
            found.append(verifier(prompt, sample))
        except BadReward as error:
            error.position = position
            raise
        except ValueError as error:
            raise BadReward(str(error), position) from error
        advance(1)
    undecided: list[float | None] = [float(each is None) for each in found]
    values: list[float | None] = [0.0 if each is None else each for each in found]
    return Scores(values, {"undecided": undecided} if may_be_undecided else {})


def _answer(prompt: Prompt) -> object:
    if prompt.answer is None:
        columns = ", ".join(sorted(prompt.columns)) or "none"
        raise BadReward(f"the row has no answer to compare with (other columns: {columns}); set `data.answer_column`")
    return prompt.answer
