"""Makes callables of the config's reward terms, and combines their values to one reward per sample.

The module also has the controller's checks of terms, which run no user code: only scorer processes do.
"""

import math
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from lockstep.config import reward as config
from lockstep.config.terms import answer_terms
from lockstep.config.terms.answer_terms import AnswerTerm
from lockstep.data.images.image_store import ImageStore
from lockstep.data.samples import Prompt
from lockstep.rewards import reward_functions, verifiers
from lockstep.rewards.answer_verifiers import box_iou, count_reward, format_reward, text_reward
from lockstep.rewards.reward_functions import ReportScored, ground_truth
from lockstep.rewards.reward_signatures import (
    RewardFunction,
    check_columns,
    load_reward_function,
    parse_reward_function,
)
from lockstep.rewards.reward_values import LARGEST_REWARD, BadReward
from lockstep.rewards.scoring_messages import (
    DataColumns,
    FunctionSignature,
    RewardSample,
    ScoringBatch,
    TermError,
    TermScores,
    read_api_key,
)

TERM_SLACK_S = 10.0
"""Added to a request's `deadline_s` for the pool's limit: within this time the term itself should report the
problem."""
Verifier = Callable[[Prompt, RewardSample], float | None]


@dataclass(frozen=True, slots=True)
class RewardTerm:
    """A term that is ready to be called."""

    name: str
    function: str
    """The term's name in errors: the configured path of a user's function, else the kind."""
    signature: FunctionSignature | None
    per_sample: bool
    score: Callable[[ScoringBatch, ReportScored], TermScores]
    """Raises BadReward."""
    limit_s: float = 0.0
    """Longest time without a finished sample that the term allows; 0 if it has no limit of its own."""


def term_names(terms: Sequence[config.RewardTerm]) -> list[str]:
    """The unique names of the terms in the metrics, in order. Does not load any code."""
    names: list[str] = []
    for term in terms:
        name = term.name or (term.path.rpartition(":")[2] if isinstance(term, config.FunctionReward) else term.kind)
        same = sum(each == name or each.startswith(f"{name}_") for each in names)
        names.append(name if name not in names else f"{name}_{same + 1}")
    return names


def build_term(
    term: config.RewardTerm,
    name: str,
    base: Path = Path(),
    concurrency: int = 1,
    data: Collection[DataColumns] = (),
    images: Path | None = None,
) -> RewardTerm:
    """Makes a term. Raises TermError or RewardFunctionError if it cannot be used, or not with one of the datasets.

    Args:
        base: the folder that paths of functions are relative to.
        concurrency: how many requests at once the term may send.
        data: the datasets whose prompts are scored.
        images: the folder of the run's `ImageStore`, if its prompts have images.
    """
    if isinstance(term, config.FunctionReward):
        function = load_reward_function(term.path, term.signature, dict(term.arguments), base, term.images)
        check_columns(function, data)
        return function_term(name, replace(function, store=None if images is None else ImageStore(images)))
    if isinstance(term, config.ModelReward) and term.url is None:
        return RewardTerm(name, term.kind, None, False, partial(_refuse_served, name))
    if isinstance(term, config.HttpReward | config.JudgeReward | config.ModelReward):
        return _server_term(term, name, concurrency)
    verifier = _make_verifier(term, base)
    return RewardTerm(
        name, term.kind, None, True, partial(_verify_batch, verifier, isinstance(term, config.MathReward))
    )


def function_term(name: str, function: RewardFunction) -> RewardTerm:
    """Makes a term of a user's function."""
    call = partial(reward_functions.CALL_ADAPTERS[function.signature], function)
    return RewardTerm(name, function.path, function.signature, function.signature == "verl", call)


def _refuse_served(name: str, batch: ScoringBatch, advance: ReportScored) -> TermScores:
    raise TermError(name, "ranks of the run compute this term, and not this process", "score it in a run")


def _server_term(
    term: config.HttpReward | config.JudgeReward | config.ModelReward, name: str, concurrency: int
) -> RewardTerm:
    """Makes a term that sends requests. Its modules are imported only here, because importing HTTP clients and
    templates takes half a second."""
    if isinstance(term, config.HttpReward):
        from lockstep.rewards.http_reward import HttpTerm

        score: Callable[[ScoringBatch, ReportScored], TermScores] = HttpTerm(term, name, concurrency).score
    elif isinstance(term, config.ModelReward):
        from lockstep.rewards.model_server import ModelServerTerm

        score = ModelServerTerm(term, name, concurrency).score
    else:
        from lockstep.rewards.llm_judge import JudgeTerm

        score = JudgeTerm(term, name, concurrency).score
    return RewardTerm(name, term.kind, None, term.kind == "judge", score, term.deadline_s + TERM_SLACK_S)


def weighted_rewards(values: Sequence[np.ndarray], weights: Sequence[float]) -> np.ndarray:
    """The reward of each sample, float32 `[samples]`: the sum of weight times value (float64 `[samples]` each) over
    the terms that apply to it (value not NaN). Raises BadReward for a sample to which no term applies, or whose sum
    exceeds float32."""
    table = np.stack([np.asarray(each, np.float64) for each in values])
    applies = ~np.isnan(table)
    for position in np.flatnonzero(~applies.any(axis=0)):
        raise BadReward("no term applies to this sample: each returned None", int(position))
    total = np.where(applies, table * np.asarray(weights, np.float64)[:, None], 0.0).sum(axis=0)
    for position in np.flatnonzero(~(np.abs(total) <= LARGEST_REWARD)):
        raise BadReward(f"the weighted sum {total[position]} is not finite in float32", int(position))
    rewards: np.ndarray = total.astype(np.float32)
    return rewards


LocalTermConfig = (
    config.ExactMatchReward
    | config.MathReward
    | config.RegexReward
    | config.LengthPenalty
    | config.JsonSchemaReward
    | config.EnvironmentReward
    | config.TaskReward
    | AnswerTerm
)
"""Terms that verify one sample after the other, without user code or a server."""


def _make_verifier(term: LocalTermConfig, base: Path) -> Verifier:
    match term:
        case config.JsonSchemaReward():
            return _schema_verifier(term, base)
        case config.ExactMatchReward(ignore_case=fold, extract=extract):
            return lambda prompt, sample: verifiers.exact_match(sample.text, _answer(prompt), fold, extract)
        case config.MathReward(numeric_tolerance=tolerance):
            return lambda prompt, sample: verifiers.math_equal(sample.text, _answer(prompt), tolerance)
        case config.RegexReward(pattern=pattern, mode=mode):
            return lambda prompt, sample: verifiers.regex_match(sample.text, pattern, mode)
        case config.LengthPenalty(soft=soft, hard=hard):
            return lambda prompt, sample: verifiers.overlong_penalty(sample.generated, soft, hard)
        case config.EnvironmentReward():
            return lambda prompt, sample: _environment_reward(sample)
        case config.TaskReward(extract=extract):
            return lambda prompt, sample: _task_reward(prompt, sample.text, extract)
        case answer_terms.IouReward():
            return lambda prompt, sample: box_iou(sample.text, _answer(prompt), term, prompt.images)
        case answer_terms.CountReward():
            return lambda prompt, sample: count_reward(sample.text, _answer(prompt), term)
        case answer_terms.TextAnswerReward():
            return lambda prompt, sample: text_reward(sample.text, _answer(prompt), term)
        case answer_terms.AnswerFormatReward():
            return lambda prompt, sample: format_reward(sample.text, term)


def _environment_reward(sample: RewardSample) -> float:
    if sample.episode is None:
        raise BadReward("the completion has no environment: set rollout.environment")
    return math.fsum(sample.episode.rewards)


def _task_reward(prompt: Prompt, text: str, extract: str | None) -> float:
    from lockstep.data.datasets import TASK_COLUMN, task_score  # takes seconds to import, and few runs have this term

    task = prompt.columns.get(TASK_COLUMN)
    if task is None:
        raise BadReward("the row has no task: the term needs data of kind reasoning_gym")
    answer = text if extract is None else verifiers.last_match(extract, text)
    return 0.0 if answer is None else task_score(task, answer.strip())


def _schema_verifier(term: config.JsonSchemaReward, base: Path) -> Verifier:
    from lockstep.rewards.json_schema import JsonSchemaVerifier, read_schema

    schema = JsonSchemaVerifier(read_schema(term, base), term.extract, term.partial)
    return lambda prompt, sample: schema.score(sample.text)


def _verify_batch(verifier: Verifier, may_be_undecided: bool, batch: ScoringBatch, advance: ReportScored) -> TermScores:
    """Verifies one sample after the other. Undecided samples score 0; if there may be some, `undecided` marks them."""
    results: list[float | None] = []
    for position, (prompt, sample) in enumerate(batch.pairs()):
        try:
            results.append(verifier(prompt, sample))
        except BadReward as error:
            error.position = position
            raise
        except ValueError as error:
            raise BadReward(str(error), position) from error
        advance(1)
    undecided: list[float | None] = [float(each is None) for each in results]
    values: list[float | None] = [0.0 if each is None else each for each in results]
    return TermScores(values, {"undecided": undecided} if may_be_undecided else {})


def _answer(prompt: Prompt) -> object:
    if prompt.answer is None:
        columns = ", ".join(sorted(prompt.columns)) or "none"
        raise BadReward(f"the row has no answer to compare with (other columns: {columns}); set `data.answer_column`")
    return prompt.answer


def check_terms(
    terms: Sequence[config.RewardTerm], base: Path = Path(), environment: Mapping[str, str] = os.environ
) -> None:
    """Checks that user functions exist in their source files, schemas are valid, and API keys are in the environment.
    Runs no user code and contacts no server.

    Raises:
        RewardFunctionError: a file or package does not exist, is not Python, or lacks the name, or the function's
            signature fits no framework.
        TermError: a file has no valid schema, or a key is not in the environment.
    """
    for term, name in zip(terms, term_names(terms), strict=True):
        if isinstance(term, config.FunctionReward):
            parse_reward_function(term, base)
        elif config.is_remote(term):
            read_api_key(term.api_key_env, name, environment)
        elif isinstance(term, config.JsonSchemaReward):
            from lockstep.rewards.json_schema import read_schema

            read_schema(term, base)


def check_term_columns(terms: Sequence[config.RewardTerm], data: Collection[DataColumns], base: Path = Path()) -> None:
    """Raises RewardFunctionError if a dataset lacks a column that a user's function requires, as far as its source
    tells. The scorer processes check the functions that only running the module defines."""
    for term in terms:
        if isinstance(term, config.FunctionReward):
            function = parse_reward_function(term, base)
            if function is not None:
                check_columns(function, data)


def data_columns(path: str, names: Collection[str], example: Prompt) -> DataColumns:
    """What a dataset offers to reward functions.

    Args:
        names: its columns besides the prompt's.
        example: one of its prompts.
    """
    has_answer, has_truth = example.answer is not None, ground_truth(example) is not None
    return DataColumns(path, tuple(sorted({*names, *example.columns})), has_answer, has_truth)


def needs_answers(terms: Sequence[config.RewardTerm]) -> bool:
    """Whether a term needs an answer for every prompt."""
    comparing = (
        config.ExactMatchReward,
        config.MathReward,
        answer_terms.IouReward,
        answer_terms.CountReward,
        answer_terms.TextAnswerReward,
    )
    return any(isinstance(term, comparing) for term in terms)
