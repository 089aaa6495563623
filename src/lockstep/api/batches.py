"""Scores completions and packs them for training, in this process."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import TypeAdapter

from lockstep.api.run_inputs import RewardTerms
from lockstep.config.data import DatasetConfig
from lockstep.config.reward import LengthPenalty, RewardTerm
from lockstep.data.dataset_format import DatasetFormat
from lockstep.data.dataset_rows import TableRows
from lockstep.data.forest_builder import forest_from_documents, forest_from_rollouts
from lockstep.data.mini_batches import TrainingBatch
from lockstep.data.mini_batches import pack as pack_forest
from lockstep.data.packing import PackingMode
from lockstep.data.samples import Completion, Document, Group, Prompt, Rollouts
from lockstep.rewards import reward_terms
from lockstep.rewards.reward_signatures import bind_reward_function
from lockstep.rewards.reward_values import BadReward
from lockstep.rewards.scorer_pool import cut_batches, term_columns
from lockstep.rewards.scoring_messages import RewardError, ScoringBatch, TermScores

BATCH_SIZE = 64
"""Completions per call of a function, as is the default of `reward.batch_size`."""
_TERM: TypeAdapter[RewardTerm] = TypeAdapter(RewardTerm)


@dataclass(frozen=True, slots=True)
class Scores:
    """The rewards of completions, in their order: those of the first group, then those of the second, and so on."""

    rewards: np.ndarray
    """float32 `[completions]`: the weighted sum of the terms that apply."""
    terms: dict[str, np.ndarray]
    """The unweighted value of each term, float64 `[completions]`, NaN where it does not apply; also the numbers that a
    function reported besides, as `term/name`."""


def score(completions: Sequence[Group] | Sequence[Mapping[str, Any]], rewards: RewardTerms) -> Scores:
    """Scores completions in this process, as a run does in its scorer processes: to try a reward function, or to score
    what `generate` returned. There is no time limit.

    Args:
        completions: groups, or rows with `prompt`, `completion` and the columns that the terms need.
        rewards: functions with a signature of TRL, verl or OpenRLHF; terms as in the config; or a list of both.

    Raises:
        RewardError: a function raised an exception or returned no valid reward; names the sample.
        RewardFunctionError, TermError, ValidationError: a term cannot be used.
        DataError: a row has no prompt.
        ValueError: there is no completion, or a term needs tokens and rows have none.
    """
    given = [rewards] if callable(rewards) or isinstance(rewards, Mapping) else list(rewards)
    mixed: Sequence[Group | Mapping[str, Any]] = completions
    groups = [each if isinstance(each, Group) else _group_of_row(each, row) for row, each in enumerate(mixed)]
    if not groups or not given:
        raise ValueError("there is nothing to score: give at least one completion and one reward")
    terms, weights = _make_terms(given)
    if any(isinstance(each, Mapping) for each in completions) and any(
        isinstance(each, Mapping) and each.get("kind") == LengthPenalty.model_fields["kind"].default for each in given
    ):
        raise ValueError("the term `length` counts tokens, and rows have none: score the groups that generate returns")
    batches = cut_batches(groups, 0, BATCH_SIZE)
    sizes, columns, values = [len(batch) for batch in batches], dict[str, np.ndarray](), []
    for term in terms:
        columns |= term_columns(term.name, [_score_batch(term, batch) for batch in batches], sizes)
        values.append(columns[term.name])
    try:
        return Scores(reward_terms.weighted_rewards(values, weights), columns)
    except BadReward as error:
        raise RewardError("the sum of terms", error.problem) from error


def pack(
    samples: Sequence[Group] | Sequence[Document],
    advantages: npt.ArrayLike | None = None,
    *,
    token_budget: int = 4096,
    ranks: int = 1,
    mode: PackingMode = "forest",
) -> TrainingBatch:
    """Packs completions or documents into rows of at most `token_budget` tokens, in which each prompt is computed once.

    Args:
        samples: groups of equal size, or documents.
        advantages: of groups: float `[groups, completions]`, or one value per token `[groups, completions, tokens]`.
        ranks: the number of trainer ranks that share the rows.
        mode: `forest` shares prompts; `block` repeats them; `single` has one sequence per row.

    Returns:
        A batch: `minibatches()` yields the rows of each optimizer step, and `everything()` all of them.

    Raises:
        TokenBudgetExceeded: a sequence is longer than a row.
        ValueError: shapes do not match, an advantage is not finite, or documents have advantages.
    """
    documents = [each for each in samples if isinstance(each, Document)]
    if documents and (advantages is not None or len(documents) < len(samples)):
        raise ValueError("documents have no advantages, and are not mixed with groups")
    if documents:
        return pack_forest(forest_from_documents(documents), ranks, token_budget, mode)
    groups = [each for each in samples if isinstance(each, Group)]
    return pack_forest(forest_from_rollouts(Rollouts(0, 0, groups), advantages), ranks, token_budget, mode)


def _make_terms(given: Sequence[Any]) -> tuple[list[reward_terms.RewardTerm], list[float]]:
    """The terms that are ready to be called, and their weights."""
    configs: list[RewardTerm] = []
    functions: dict[int, Callable[..., Any]] = {}
    for index, each in enumerate(given):
        values = {"kind": "function", "path": each} if callable(each) else dict(each)
        if callable(values.get("path")):
            functions[index] = values["path"]
            values["path"] = f"{values['path'].__module__}:{getattr(values['path'], '__name__', 'function')}"
        configs.append(_TERM.validate_python(values))
    terms = []
    for index, (config, name) in enumerate(zip(configs, reward_terms.term_names(configs), strict=True)):
        if index in functions and config.kind == "function":
            bound = bind_reward_function(
                config.path, functions[index], config.signature, dict(config.arguments), config.images
            )
            terms.append(reward_terms.function_term(name, bound))
        else:
            terms.append(reward_terms.build_term(config, name))
    return terms, [config.weight for config in configs]


def _score_batch(term: reward_terms.RewardTerm, batch: ScoringBatch) -> TermScores:
    try:
        return term.score(batch, lambda samples: None)
    except BadReward as error:
        at = error.position
        uid, row, text = None, None, None
        if at is not None:
            uid, row, text = batch.uid(at), batch.prompts[batch.samples[at].prompt].row, batch.samples[at].text
        raise RewardError(term.function, error.problem, uid, row, text, error.returned, error.traceback) from error


def _group_of_row(row: Mapping[str, Any], number: int) -> Group:
    """A row with one completion, as a group without tokens. Raises DataError."""
    text = row.get("completion")
    if not isinstance(text, str):
        raise ValueError(f"row {number} has no `completion` that is a text: {text!r}")
    columns = {name: value for name, value in row.items() if name != "completion"}
    rows = TableRows("the given rows", list(columns), [columns])
    sample = DatasetFormat(rows, DatasetConfig(path=rows.path, format="prompt_answer")).read(0)
    messages = sample.prompt if isinstance(sample.prompt, list) else None
    prompt_text = sample.prompt if isinstance(sample.prompt, str) else ""
    none = np.empty(0, np.int32)
    prompt = Prompt(f"0:{number}", number, none, prompt_text, messages, sample.answer, sample.columns)
    return Group(prompt, [Completion(f"0:{number}", none, np.empty(0, np.float32), none, "stop", text)])
