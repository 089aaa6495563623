"""Calls users' reward functions as TRL, verl and OpenRLHF do."""

import asyncio
import copy
import inspect
import json
from collections.abc import Callable, Coroutine, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from lockstep.base.wait_state import track_wait
from lockstep.cluster.user_code import user_traceback
from lockstep.data.samples import Prompt
from lockstep.rewards.image_arguments import image_columns
from lockstep.rewards.reward_signatures import (
    ANSWER_NAMES,
    IMAGE_PARAMETERS,
    PROVIDED_PARAMETERS,
    RewardFunction,
    missing_column,
)
from lockstep.rewards.reward_values import (
    BadReward,
    check_extra,
    check_extra_column,
    check_reward,
    check_rewards,
    one_per_sample,
)
from lockstep.rewards.scoring_messages import FunctionSignature, RewardSample, ScoringBatch, TermScores

ReportScored = Callable[[int], None]
CallAdapter = Callable[[RewardFunction, ScoringBatch, ReportScored], TermScores]

RESERVED_COLUMNS = frozenset({"prompt", "completion", "completion_ids"})
"""Columns that TRL does not pass either."""
MAX_CONCURRENT_CALLS = 64
"""Largest number of concurrent calls of an async function with verl's signature."""


def call_trl(function: RewardFunction, batch: ScoringBatch, advance: ReportScored) -> TermScores:
    """Calls a function like TRL's `GRPOTrainer._calculate_rewards`: everything by keyword, columns repeated per
    completion, messages if the prompt is a conversation. The function may return None where it does not apply.
    `trainer_state.global_step` is the number of steps done. Numbers passed to `log_extra` and `log_metric` go to the
    breakdown."""
    return _call_trl(function, batch, advance, {})


def call_vlm_r1(function: RewardFunction, batch: ScoringBatch, advance: ReportScored) -> TermScores:
    """Calls a function like VLM-R1's `VLMGRPOTrainer`, which is TRL's, with the columns that its `grpo_jsonl.py` makes
    of a row: `completions[i][0]["content"]` is the completion, whatever the prompt is; `solution` is the answer in
    `<answer>` tags; `problem` is the question; `accu_reward_method` is `default` unless the row has one."""
    pairs = list(batch.pairs())
    solutions = [None if prompt.answer is None else _tagged(prompt.answer) for prompt, _ in pairs]
    columns: dict[str, list[Any]] = {
        "completions": [_sample_messages(sample) for _, sample in pairs],
        "problem": [prompt.columns.get("problem") or _question(prompt) for prompt, _ in pairs],
        "accu_reward_method": [prompt.columns.get("accu_reward_method") or "default" for prompt, _ in pairs],
    }
    if any(solution is not None for solution in solutions):
        columns["solution"] = solutions
    return _call_trl(function, batch, advance, columns)


def _tagged(answer: Any) -> str:
    """An answer as VLM-R1 writes it: without the tags that it may have, and then in tags."""
    text = answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False, default=str)
    return f"<answer> {text.replace('<answer>', '').replace('</answer>', '').strip()} </answer>"


def _question(prompt: Prompt) -> str:
    """The text of the prompt's last message of the user, without its images; the prompt itself if it is text."""
    asked = [each for each in prompt.messages or () if each.get("role") == "user"]
    if not asked:
        return prompt.text
    content = asked[-1].get("content")
    if isinstance(content, list):
        content = "".join(str(part.get("text") or "") for part in content if isinstance(part, Mapping))
    return str(content or "").replace("<image>", "")


def _call_trl(
    function: RewardFunction, batch: ScoringBatch, advance: ReportScored, columns: Mapping[str, list[Any]]
) -> TermScores:
    """Calls a function with TRL's arguments.

    Args:
        columns: columns that take the place of the data's.
    """
    logged: dict[str, list[float | None]] = {}

    def log(name: str, value: object) -> None:
        column = check_extra_column(value, len(batch))
        if column is not None:
            logged[name] = column

    offered: dict[str, Any] = {
        **_with_images(function, batch, conversation_batch(batch)),
        **columns,
        "completion_ids": [sample.tokens.tolist() for sample in batch.samples],
        "trainer_state": SimpleNamespace(global_step=batch.step),
        "log_extra": log,
        "log_metric": log,
    }
    result = _invoke(function, _select_arguments(function, offered, batch))
    values = check_rewards(result, len(batch), none_allowed=True)
    advance(len(batch))
    return TermScores(values, logged)


def _with_images(function: RewardFunction, batch: ScoringBatch, columns: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """The columns with those of the prompts' images: PIL images in place of what the data has, paths if it has none."""
    found = image_columns(function, batch)
    pixels = {name: column for name, column in found.items() if name in ("image", "images")}
    return {**found, **columns, **pixels}


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
        named = {"references": labels, **_with_images(function, batch, _batch_columns(batch))}
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
    images = image_columns(function, batch)
    arguments_of = [
        _verl_arguments(function, batch, position, {name: column[position] for name, column in images.items()})
        for position in range(len(batch))
    ]
    if inspect.iscoroutinefunction(function.call):
        results = _run_coroutine(function, _run_concurrently(function, arguments_of, advance))
    else:
        results = []
        for position, arguments in enumerate(arguments_of):
            results.append(_invoke(function, arguments, position=position))
            advance(1)
    return _verl_scores(results)


def _verl_scores(results: Sequence[Any]) -> TermScores:
    """The scores in what verl's functions return for each sample: a number, or a dict with `score`."""
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
                    scores.extras.setdefault(str(name), [None] * len(results))[position] = number
        scores.values.append(check_reward(value, position))
    return scores


def call_verl_batch(function: RewardFunction, batch: ScoringBatch, advance: ReportScored) -> TermScores:
    """Calls a function like the `compute_score` of verl's batch reward manager: all samples at once, in lists. Each
    item of the result is as for `call_verl`."""
    pairs = list(batch.pairs())
    offered = {
        "data_sources": [prompt.columns.get("data_source") for prompt, _ in pairs],
        "solution_strs": [sample.text for _, sample in pairs],
        "ground_truths": [ground_truth(prompt) for prompt, _ in pairs],
        # Copies, because a function may change them.
        "extra_infos": [copy.deepcopy(prompt.columns.get("extra_info")) for prompt, _ in pairs],
    }
    columns = _with_images(function, batch, _batch_columns(batch))
    columns = {name: values for name, values in columns.items() if name in function.parameters}
    result = _invoke(function, _select_arguments(function, columns | offered, batch))
    items = one_per_sample(result, len(batch))
    advance(len(batch))
    return _verl_scores(items)


CALL_ADAPTERS: Mapping[FunctionSignature, CallAdapter] = {
    "trl": call_trl,
    "vlm_r1": call_vlm_r1,
    "verl": call_verl,
    "verl_batch": call_verl_batch,
    "openrlhf": call_openrlhf,
}


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
        "labels": [ground_truth(prompt) for prompt, _ in pairs],
    }


def _verl_arguments(
    function: RewardFunction, batch: ScoringBatch, position: int, images: dict[str, Any]
) -> dict[str, Any]:
    prompt, sample = batch.prompts[batch.samples[position].prompt], batch.samples[position]
    offered: dict[str, Any] = {"solution_str": sample.text, "extra_info": prompt.columns.get("extra_info"), **images}
    # A copy, because a function may change its extra_info.
    offered["extra_info"] = copy.deepcopy(offered["extra_info"])
    truth = ground_truth(prompt)
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
    provided = PROVIDED_PARAMETERS[function.signature]
    for name in function.requires():
        if name in provided or name in (IMAGE_PARAMETERS[function.images] & offered.keys()):
            continue
        for position, (prompt, _) in enumerate(batch.pairs()):
            if name not in prompt.columns and not (name in ANSWER_NAMES and prompt.answer is not None):
                raise _missing_column(name, prompt, position)
    return chosen


def _missing_column(name: str, prompt: Prompt, position: int) -> BadReward:
    available = sorted(prompt.columns) + ([] if prompt.answer is None else ["the answer"])
    problem, remedy = missing_column(name, available, "the row")
    return BadReward(f"{problem}; {remedy}", position)


def _batch_columns(batch: ScoringBatch) -> dict[str, list[Any]]:
    """Every column, one value per completion, None if a row lacks it; the answer under its usual names."""
    names = {name: None for prompt in batch.prompts for name in prompt.columns if name not in RESERVED_COLUMNS}
    columns = {name: [prompt.columns.get(name) for prompt, _ in batch.pairs()] for name in names}
    answers = [prompt.answer for prompt, _ in batch.pairs()]
    if any(answer is not None for answer in answers):
        for name in ANSWER_NAMES:
            columns.setdefault(name, answers)
    return columns


def ground_truth(prompt: Prompt) -> Any:
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
