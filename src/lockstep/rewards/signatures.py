"""Calling a user's function the way TRL, verl and OpenRLHF call it.

Each takes the function, the batch and `advance(samples)`, which is told what has been finished, and returns Scores
or raises BadReward.
"""

import asyncio
import copy
import difflib
import inspect
from collections.abc import Callable, Coroutine, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from lockstep.cluster.user_code import user_traceback
from lockstep.data.samples import Prompt
from lockstep.rewards.api import Batch, Sample, Scores, Signature
from lockstep.rewards.functions import UserFunction
from lockstep.rewards.values import BadReward, extra, extra_column, reward, rewards
from lockstep.watch import waits

Advance = Callable[[int], None]
Adapter = Callable[[UserFunction, Batch, Advance], Scores]

ANSWERS = ("answer", "solution", "ground_truth", "label")
"""Names under which functions look for the ground truth; offered where no column has them."""
RESERVED = frozenset({"prompt", "completion", "completion_ids"})
"""Columns that TRL does not hand over either."""
CONCURRENT = 64
"""Calls under way at once of an async function that takes one sample."""


def call_trl(function: UserFunction, batch: Batch, advance: Advance) -> Scores:
    """TRL's `GRPOTrainer._calculate_rewards`: everything by keyword, columns repeated per completion, messages where
    the prompt is a conversation, None where the function does not apply. `trainer_state.global_step` is the step;
    what goes to `log_extra` and `log_metric` comes out in the breakdown, where it is numeric."""
    logged: dict[str, list[float | None]] = {}

    def log(name: str, value: object) -> None:
        column = extra_column(value, len(batch))
        if column is not None:
            logged[name] = column

    offered: dict[str, Any] = {
        **conversation_batch(batch),
        "completion_ids": [sample.tokens.tolist() for sample in batch.samples],
        "trainer_state": SimpleNamespace(global_step=batch.step),
        "log_extra": log,
        "log_metric": log,
    }
    result = _invoke(function, _selected(function, offered, batch))
    values = rewards(result, len(batch), none_allowed=True)
    advance(len(batch))
    return Scores(values, logged)


def _messages(sample: Sample) -> list[dict[str, Any]]:
    """As TRL hands over conversations: every turn after the prompt, tools' included."""
    if sample.episode is None:
        return [{"role": "assistant", "content": sample.text}]
    return copy.deepcopy(sample.episode.messages)


def call_openrlhf(function: UserFunction, batch: Batch, advance: Advance) -> Scores:
    """OpenRLHF's custom `reward_func`: queries are prompt and completion in one text. `rewards` are what is trained
    on; `scores` and `extra_logs` come out in the breakdown."""
    queries, prompts, labels = query_batch(batch).values()
    offered = {"queries": queries, "prompts": prompts, "labels": labels}
    if function.takes("queries"):
        # its `**kwargs` do not expect the data's columns; one that it names, it gets
        named = {"references": labels, **_columns(batch)}
        offered |= {name: value for name, value in named.items() if name in function.parameters}
        result = _invoke(function, _selected(function, offered, batch))
    else:
        result = _invoke(function, dict(function.arguments), (queries, prompts, labels))
    extras: dict[str, Any] = {}
    if isinstance(result, Mapping):
        if "rewards" not in result:
            raise BadReward("returned a dict without 'rewards'", None, result)
        logs = result.get("extra_logs")
        extras = {"scores": result.get("scores"), **(logs if isinstance(logs, Mapping) else {})}
        result = result["rewards"]
    values = rewards(result, len(batch), none_allowed=False)
    advance(len(batch))
    columns = {str(name): extra_column(value, len(batch)) for name, value in extras.items()}
    return Scores(values, {name: column for name, column in columns.items() if column is not None})


def call_verl(function: UserFunction, batch: Batch, advance: Advance) -> Scores:
    """verl's `compute_score`, once per sample; async ones run concurrently. The dict's `score` is the reward, its
    other numbers come out in the breakdown."""
    given = [_verl_arguments(function, batch, position) for position in range(len(batch))]
    if inspect.iscoroutinefunction(function.call):
        results = _run(function, _gather(function, given, advance))
    else:
        results = []
        for position, arguments in enumerate(given):
            results.append(_invoke(function, arguments, position=position))
            advance(1)
    scores = Scores()
    for position, result in enumerate(results):
        value = result
        if isinstance(result, Mapping):
            if "score" not in result:
                raise BadReward("returned a dict without 'score'", position, result)
            value = result["score"]
            for name, besides in result.items():
                number = extra(besides)
                if name != "score" and number is not None:
                    scores.extras.setdefault(str(name), [None] * len(batch))[position] = number
        scores.values.append(reward(value, position))
    return scores


ADAPTERS: Mapping[Signature, Adapter] = {"trl": call_trl, "verl": call_verl, "openrlhf": call_openrlhf}


def conversation_batch(batch: Batch) -> dict[str, list[Any]]:
    """Columns, prompts and completions as TRL hands them over: repeated per completion, messages where the prompt is
    a conversation."""
    return {
        **_columns(batch),
        "prompts": [prompt.text if prompt.messages is None else prompt.messages for prompt, _ in batch.pairs()],
        "completions": [
            sample.text if prompt.messages is None else _messages(sample) for prompt, sample in batch.pairs()
        ],
    }


def query_batch(batch: Batch) -> dict[str, list[Any]]:
    """What OpenRLHF sends to a remote reward: prompt and completion in one text, prompts, ground truths."""
    pairs = list(batch.pairs())
    return {
        "query": [prompt.text + sample.text for prompt, sample in pairs],
        "prompts": [prompt.text for prompt, _ in pairs],
        "labels": [_ground_truth(prompt) for prompt, _ in pairs],
    }


def _verl_arguments(function: UserFunction, batch: Batch, position: int) -> dict[str, Any]:
    prompt, sample = batch.prompts[batch.samples[position].prompt], batch.samples[position]
    offered: dict[str, Any] = {"solution_str": sample.text, "extra_info": prompt.columns.get("extra_info")}
    # A function may write into its extra_info; its next sample shall not see that.
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
            raise _missing(name, prompt, position)
    return chosen


def _selected(function: UserFunction, offered: Mapping[str, Any], batch: Batch) -> dict[str, Any]:
    """Of what is offered, what the function takes. Raises BadReward for a column that it requires and a row lacks."""
    chosen = {name: value for name, value in offered.items() if function.takes(name)} | function.arguments
    own = {"prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric", "queries"}
    for name in function.requires():
        if name in own or name in ("labels", "references"):
            continue
        for position, (prompt, _) in enumerate(batch.pairs()):
            if name not in prompt.columns and not (name in ANSWERS and prompt.answer is not None):
                raise _missing(name, prompt, position)
    return chosen


def _missing(name: str, prompt: Prompt, position: int) -> BadReward:
    there = sorted(prompt.columns) + ([] if prompt.answer is None else ["the answer"])
    close = difflib.get_close_matches(name, there, n=1)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    problem = f"requires the column {name!r}, which the row does not have{hint}; it has {', '.join(there) or 'none'}"
    return BadReward(f"{problem}. Add the column, or set it under the term's `arguments`", position)


def _columns(batch: Batch) -> dict[str, list[Any]]:
    """Every column, one value per completion, None where a row lacks it; the answer under its usual names."""
    names = {name: None for prompt in batch.prompts for name in prompt.columns if name not in RESERVED}
    columns = {name: [prompt.columns.get(name) for prompt, _ in batch.pairs()] for name in names}
    answers = [prompt.answer for prompt, _ in batch.pairs()]
    if any(answer is not None for answer in answers):
        for name in ANSWERS:
            columns.setdefault(name, answers)
    return columns


def _ground_truth(prompt: Prompt) -> Any:
    if prompt.answer is not None:
        return prompt.answer
    model = prompt.columns.get("reward_model")
    return model.get("ground_truth") if isinstance(model, Mapping) else None


def _invoke(
    function: UserFunction, named: dict[str, Any], positional: Sequence[Any] = (), position: int | None = None
) -> Any:
    """Calls the function, in which anything may happen. Raises BadReward."""
    try:
        result = function.call(*positional, **named)
        return _run(function, _awaited(result)) if inspect.isawaitable(result) else result
    except (Exception, SystemExit) as error:  # whatever it is, it is told with the traceback
        raise _raised(error, position) from error


def _run(function: UserFunction, coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Runs a coroutine; its bound is the pool's, which ends the process when no sample is finished for too long."""
    with waits.waiting("async function", function.path, "its rewards"):
        return asyncio.run(coroutine)


async def _awaited(result: Any) -> Any:
    return await result


async def _gather(function: UserFunction, given: list[dict[str, Any]], advance: Advance) -> list[Any]:
    """Runs one coroutine per sample, at most CONCURRENT at once; the first failure cancels the others."""
    free = asyncio.Semaphore(CONCURRENT)

    async def one(position: int, arguments: dict[str, Any]) -> Any:
        async with free:
            coroutine: Coroutine[Any, Any, Any] = function.call(**arguments)
            try:
                result = await coroutine
            except (Exception, SystemExit) as error:  # whatever it is, it is told with the traceback
                raise _raised(error, position) from error
            advance(1)
            return result

    tasks = [asyncio.create_task(one(position, arguments)) for position, arguments in enumerate(given)]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def _raised(error: BaseException, position: int | None) -> BadReward:
    problem = f"raised {type(error).__name__}: {error}"
    if isinstance(error, MemoryError):
        problem = "ran out of memory (`reward.memory_mb` limits a scorer process)"
    return BadReward(problem, position, traceback=user_traceback(error))
