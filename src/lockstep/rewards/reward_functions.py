"""Loads users' reward functions, detects their signature, and calls them as TRL, verl and OpenRLHF do."""

import asyncio
import copy
import difflib
import inspect
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

from lockstep.base.wait_state import track_wait
from lockstep.cluster.user_code import UserCodeError, load_object, suggest_name, user_traceback
from lockstep.data.samples import Prompt
from lockstep.rewards.reward_values import BadReward, check_extra, check_extra_column, check_reward, check_rewards
from lockstep.rewards.scoring_messages import FunctionSignature, RewardSample, ScoringBatch, TermScores

DISTINCTIVE_PARAMETERS: Mapping[FunctionSignature, frozenset[str]] = {
    "trl": frozenset({"completions", "completion_ids", "trainer_state"}),
    "verl": frozenset({"solution_str"}),
    "openrlhf": frozenset({"queries"}),
}
"""The parameters that only this signature has."""
SIGNATURE_FORMS: Mapping[FunctionSignature, str] = {
    "trl": "f(prompts, completions, **columns) -> list[float | None]",
    "verl": "f(data_source, solution_str, ground_truth, extra_info=None) -> float | dict",
    "openrlhf": "f(queries, prompts, labels, **kwargs) -> dict | tensor | list",
}
PROVIDED_PARAMETERS: Mapping[FunctionSignature, frozenset[str]] = {
    "trl": frozenset({"prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric"}),
    "verl": frozenset({"data_source", "solution_str", "ground_truth", "extra_info"}),
    "openrlhf": frozenset({"queries", "prompts", "labels", "references"}),
}
"""Arguments that each signature provides in addition to the data's columns."""


class RewardFunctionError(UserCodeError):
    """A reward function cannot be used. Names its path, the problem and a fix."""

    noun = "reward function"


@dataclass(frozen=True, slots=True)
class RewardFunction:
    """A loaded reward function and how to call it."""

    path: str
    call: Callable[..., Any]
    signature: FunctionSignature
    parameters: Mapping[str, inspect.Parameter]
    """Parameters that can be passed by keyword (for OpenRLHF, by position)."""
    has_kwargs: bool
    arguments: dict[str, Any] = field(default_factory=dict)
    """The configured arguments."""

    def takes(self, name: str) -> bool:
        return self.has_kwargs or name in self.parameters

    def requires(self) -> list[str]:
        """Parameters with neither a default nor a configured argument."""
        empty = inspect.Parameter.empty
        return [name for name, each in self.parameters.items() if each.default is empty and name not in self.arguments]


def load_reward_function(
    path: str,
    signature: Literal["auto"] | FunctionSignature = "auto",
    arguments: dict[str, Any] | None = None,
    base: Path = Path(),
) -> RewardFunction:
    """Loads the function at `file.py:name` (relative to `base`) or `package.module:name`. Raises
    RewardFunctionError."""
    function = _check_callable(path, load_object(path, base, RewardFunctionError))
    parameters, has_kwargs = _parameters(path, function)
    detected = detect_signature(path, parameters) if signature == "auto" else signature
    loaded = RewardFunction(path, function, detected, parameters, has_kwargs, dict(arguments or {}))
    _check_function(loaded)
    return loaded


def detect_signature(path: str, parameters: Mapping[str, inspect.Parameter]) -> FunctionSignature:
    """Detects the signature by the names of the parameters. Raises RewardFunctionError if none or several match."""
    matches = [signature for signature, names in DISTINCTIVE_PARAMETERS.items() if not names.isdisjoint(parameters)]
    if len(matches) == 1:
        return matches[0]
    listed = ", ".join(parameters) or "no named parameter"
    if matches:
        problem = f"its parameters ({listed}) fit the signatures of {' and '.join(matches)}"
    else:
        problem = f"its parameters ({listed}) fit none of the known signatures: " + "  ".join(SIGNATURE_FORMS.values())
    raise RewardFunctionError(path, problem, "set `signature: trl`, `verl` or `openrlhf` on the term")


def _check_callable(path: str, loaded: Any) -> Callable[..., Any]:
    name = path.rpartition(":")[2]
    if inspect.isclass(loaded):
        raise RewardFunctionError(path, f"{name} is a class", "name a function, or an instance that can be called")
    if not callable(loaded):
        raise RewardFunctionError(path, f"{name} is {type(loaded).__name__}, which cannot be called")
    function: Callable[..., Any] = loaded
    return function


def _parameters(path: str, function: Callable[..., Any]) -> tuple[dict[str, inspect.Parameter], bool]:
    try:
        every = inspect.signature(function).parameters
    except (TypeError, ValueError) as error:
        raise RewardFunctionError(
            path, f"its parameters cannot be read ({error})", "wrap it in a Python function"
        ) from error
    variable = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    named = {name: each for name, each in every.items() if each.kind not in variable}
    return named, any(each.kind is inspect.Parameter.VAR_KEYWORD for each in every.values())


def _check_function(user: RewardFunction) -> None:
    """Raises RewardFunctionError if the function cannot be called with its signature and configured arguments."""
    for name in user.arguments:
        if name in PROVIDED_PARAMETERS[user.signature] - {"data_source", "extra_info", "labels", "ground_truth"}:
            raise RewardFunctionError(user.path, f"`arguments` sets {name!r}, which the framework provides")
        if not user.takes(name):
            hint = suggest_name(name, list(user.parameters))
            raise RewardFunctionError(user.path, f"`arguments` sets {name!r}, which is not one of its parameters", hint)
    if user.signature == "openrlhf" and not user.takes("queries") and len(user.parameters) >= 3:
        return  # called by position
    if not any(user.takes(name) for name in PROVIDED_PARAMETERS[user.signature]) or has_positional_only(user):
        listed = ", ".join(user.parameters) or "none"
        raise RewardFunctionError(
            user.path,
            f"its parameters ({listed}) cannot take the signature {user.signature}",
            f"expected {SIGNATURE_FORMS[user.signature]}",
        )


def has_positional_only(user: RewardFunction) -> bool:
    return any(each.kind is inspect.Parameter.POSITIONAL_ONLY for each in user.parameters.values())


ReportScored = Callable[[int], None]
CallAdapter = Callable[[RewardFunction, ScoringBatch, ReportScored], TermScores]

ANSWER_NAMES = ("answer", "solution", "ground_truth", "label")
"""Names under which functions expect the ground truth; provided if no column has the name."""
RESERVED_COLUMNS = frozenset({"prompt", "completion", "completion_ids"})
"""Columns that TRL does not pass either."""
MAX_CONCURRENT_CALLS = 64
"""Largest number of concurrent calls of an async function with verl's signature."""


def call_trl(function: RewardFunction, batch: ScoringBatch, advance: ReportScored) -> TermScores:
    """Calls a function like TRL's `GRPOTrainer._calculate_rewards`: everything by keyword, columns repeated per
    completion, messages if the prompt is a conversation. The function may return None where it does not apply.
    `trainer_state.global_step` is the step. Numbers passed to `log_extra` and `log_metric` go to the breakdown."""
    logged: dict[str, list[float | None]] = {}

    def log(name: str, value: object) -> None:
        column = check_extra_column(value, len(batch))
        if column is not None:
            logged[name] = column

    offered: dict[str, Any] = {
        **conversation_batch(batch),
        "completion_ids": [sample.tokens.tolist() for sample in batch.samples],
        "trainer_state": SimpleNamespace(global_step=batch.step),
        "log_extra": log,
        "log_metric": log,
    }
    result = _invoke(function, _select_arguments(function, offered, batch))
    values = check_rewards(result, len(batch), none_allowed=True)
    advance(len(batch))
    return TermScores(values, logged)


def _sample_messages(sample: RewardSample) -> list[dict[str, Any]]:
    """A conversation as TRL passes it: all messages after the prompt, including those of tools."""
    if sample.episode is None:
        return [{"role": "assistant", "content": sample.text}]
    return copy.deepcopy(sample.episode.messages)


def call_openrlhf(function: RewardFunction, batch: ScoringBatch, advance: ReportScored) -> TermScores:
    """Calls a function like OpenRLHF's custom `reward_func`: queries are prompt and completion in one text. `rewards`
    in the result are the rewards; `scores` and `extra_logs` go to the breakdown."""
    queries, prompts, labels = query_batch(batch).values()
    offered = {"queries": queries, "prompts": prompts, "labels": labels}
    if function.takes("queries"):
        # Such functions do not expect the data's columns in `**kwargs`, so only named parameters get them.
        named = {"references": labels, **_batch_columns(batch)}
        offered |= {name: value for name, value in named.items() if name in function.parameters}
        result = _invoke(function, _select_arguments(function, offered, batch))
    else:
        result = _invoke(function, dict(function.arguments), (queries, prompts, labels))
    extras: dict[str, Any] = {}
    if isinstance(result, Mapping):
        if "rewards" not in result:
            raise BadReward("returned a dict without 'rewards'", None, result)
        logs = result.get("extra_logs")
        extras = {"scores": result.get("scores"), **(logs if isinstance(logs, Mapping) else {})}
        result = result["rewards"]
    values = check_rewards(result, len(batch), none_allowed=False)
    advance(len(batch))
    columns = {str(name): check_extra_column(value, len(batch)) for name, value in extras.items()}
    return TermScores(values, {name: column for name, column in columns.items() if column is not None})


def call_verl(function: RewardFunction, batch: ScoringBatch, advance: ReportScored) -> TermScores:
    """Calls a function like verl's `compute_score`, once per sample; async functions run concurrently. If it returns a
    dict, `score` is the reward, and other numbers go to the breakdown."""
    arguments_of = [_verl_arguments(function, batch, position) for position in range(len(batch))]
    if inspect.iscoroutinefunction(function.call):
        results = _run_coroutine(function, _run_concurrently(function, arguments_of, advance))
    else:
        results = []
        for position, arguments in enumerate(arguments_of):
            results.append(_invoke(function, arguments, position=position))
            advance(1)
    scores = TermScores()
    for position, result in enumerate(results):
        value = result
        if isinstance(result, Mapping):
            if "score" not in result:
                raise BadReward("returned a dict without 'score'", position, result)
            value = result["score"]
            for name, extra in result.items():
                number = check_extra(extra)
                if name != "score" and number is not None:
                    scores.extras.setdefault(str(name), [None] * len(batch))[position] = number
        scores.values.append(check_reward(value, position))
    return scores


CALL_ADAPTERS: Mapping[FunctionSignature, CallAdapter] = {"trl": call_trl, "verl": call_verl, "openrlhf": call_openrlhf}


def conversation_batch(batch: ScoringBatch) -> dict[str, list[Any]]:
    """Columns, prompts and completions as TRL passes them: repeated per completion, messages if the prompt is a
    conversation."""
    return {
        **_batch_columns(batch),
        "prompts": [prompt.text if prompt.messages is None else prompt.messages for prompt, _ in batch.pairs()],
        "completions": [
            sample.text if prompt.messages is None else _sample_messages(sample) for prompt, sample in batch.pairs()
        ],
    }


def query_batch(batch: ScoringBatch) -> dict[str, list[Any]]:
    """The fields that OpenRLHF sends to a remote reward: prompt and completion in one text, prompts, ground truths."""
    pairs = list(batch.pairs())
    return {
        "query": [prompt.text + sample.text for prompt, sample in pairs],
        "prompts": [prompt.text for prompt, _ in pairs],
        "labels": [_ground_truth(prompt) for prompt, _ in pairs],
    }


def _verl_arguments(function: RewardFunction, batch: ScoringBatch, position: int) -> dict[str, Any]:
    prompt, sample = batch.prompts[batch.samples[position].prompt], batch.samples[position]
    offered: dict[str, Any] = {"solution_str": sample.text, "extra_info": prompt.columns.get("extra_info")}
    # A copy, because a function may change its extra_info.
    offered["extra_info"] = copy.deepcopy(offered["extra_info"])
    truth = _ground_truth(prompt)
    if truth is not None:
        offered["ground_truth"] = truth
    if "data_source" in prompt.columns:
        offered["data_source"] = prompt.columns["data_source"]
    for name in function.parameters:
        if name in prompt.columns:
            offered.setdefault(name, prompt.columns[name])
    chosen = {name: value for name, value in offered.items() if function.takes(name)} | function.arguments
    for name in function.requires():
        if name not in chosen:
            raise _missing_column(name, prompt, position)
    return chosen


def _select_arguments(function: RewardFunction, offered: Mapping[str, Any], batch: ScoringBatch) -> dict[str, Any]:
    """Selects the offered arguments that the function takes. Raises BadReward if a row lacks a required column."""
    chosen = {name: value for name, value in offered.items() if function.takes(name)} | function.arguments
    provided = {"prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric", "queries"}
    for name in function.requires():
        if name in provided or name in ("labels", "references"):
            continue
        for position, (prompt, _) in enumerate(batch.pairs()):
            if name not in prompt.columns and not (name in ANSWER_NAMES and prompt.answer is not None):
                raise _missing_column(name, prompt, position)
    return chosen


def _missing_column(name: str, prompt: Prompt, position: int) -> BadReward:
    available = sorted(prompt.columns) + ([] if prompt.answer is None else ["the answer"])
    close = difflib.get_close_matches(name, available, n=1)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    problem = (
        f"requires the column {name!r}, which the row does not have{hint}; it has {', '.join(available) or 'none'}"
    )
    return BadReward(f"{problem}. Add the column, or set it under the term's `arguments`", position)


def _batch_columns(batch: ScoringBatch) -> dict[str, list[Any]]:
    """Every column, one value per completion, None if a row lacks it; the answer under its usual names."""
    names = {name: None for prompt in batch.prompts for name in prompt.columns if name not in RESERVED_COLUMNS}
    columns = {name: [prompt.columns.get(name) for prompt, _ in batch.pairs()] for name in names}
    answers = [prompt.answer for prompt, _ in batch.pairs()]
    if any(answer is not None for answer in answers):
        for name in ANSWER_NAMES:
            columns.setdefault(name, answers)
    return columns


def _ground_truth(prompt: Prompt) -> Any:
    if prompt.answer is not None:
        return prompt.answer
    model = prompt.columns.get("reward_model")
    return model.get("ground_truth") if isinstance(model, Mapping) else None


def _invoke(
    function: RewardFunction, named: dict[str, Any], positional: Sequence[Any] = (), position: int | None = None
) -> Any:
    """Calls the function. Raises BadReward for any exception that the function raises."""
    try:
        result = function.call(*positional, **named)
        return _run_coroutine(function, _await_result(result)) if inspect.isawaitable(result) else result
    except (Exception, SystemExit) as error:  # any error is reported with its traceback
        raise _user_code_failure(error, position) from error


def _run_coroutine(function: RewardFunction, coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Runs a coroutine, without a time limit: the pool kills the process if no sample finishes for too long."""
    with track_wait("async function", function.path, "its rewards"):
        return asyncio.run(coroutine)


async def _await_result(result: Any) -> Any:
    return await result


async def _run_concurrently(
    function: RewardFunction, arguments_of: list[dict[str, Any]], advance: ReportScored
) -> list[Any]:
    """Runs one coroutine per sample, at most MAX_CONCURRENT_CALLS at once; the first failure cancels the others."""
    free = asyncio.Semaphore(MAX_CONCURRENT_CALLS)

    async def one(position: int, arguments: dict[str, Any]) -> Any:
        async with free:
            coroutine: Coroutine[Any, Any, Any] = function.call(**arguments)
            try:
                result = await coroutine
            except (Exception, SystemExit) as error:  # any error is reported with its traceback
                raise _user_code_failure(error, position) from error
            advance(1)
            return result

    tasks = [asyncio.create_task(one(position, arguments)) for position, arguments in enumerate(arguments_of)]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def _user_code_failure(error: BaseException, position: int | None) -> BadReward:
    problem = f"raised {type(error).__name__}: {error}"
    if isinstance(error, MemoryError):
        problem = "ran out of memory (`reward.memory_mb` limits a scorer process)"
    return BadReward(problem, position, traceback=user_traceback(error))
