"""A reward that a server computes: lists of prompts and completions in, a list of numbers out.

What is sent (`signature`), as JSON, for the completions of one request:

    trl       {"prompts": [...], "completions": [...], "COLUMN": [...], ...}
    openrlhf  {"query": [...], "prompts": [...], "labels": [...]}      query is prompt and completion in one text

What may come back: `[1.0, ...]`, or `{"rewards": [1.0, ...], "scores": [...], "extra_logs": {"KEY": [...]}}`, one
number per completion in their order; null where the term does not apply.
"""

import asyncio
import json
from collections.abc import Iterator, Mapping
from typing import Any

from lockstep.config.reward import Http
from lockstep.rewards import values
from lockstep.rewards.api import Batch, Scores
from lockstep.rewards.endpoint import SLACK_S, Answer, Endpoint, Limits, Unanswered
from lockstep.rewards.keys import key_from
from lockstep.rewards.signatures import Advance, conversation_batch, query_batch
from lockstep.rewards.values import BadReward
from lockstep.watch import waits


class Remote:
    """A term of kind http."""

    def __init__(self, term: Http, name: str, concurrency: int) -> None:
        self.term, self.name, self.concurrency = term, name, concurrency
        limits = Limits(term.timeout_s, term.retries, term.deadline_s)
        self.endpoint = Endpoint(term.url, key_from(term.api_key_env, name), limits)

    def score(self, batch: Batch, advance: Advance) -> Scores:
        """One request per `batch_size` samples, `concurrency` at once. The first that fails cancels the others."""
        scores = Scores([None] * len(batch))
        parts = [
            (start, batch.part(start, self.term.batch_size)) for start in range(0, len(batch), self.term.batch_size)
        ]
        done = 0

        def finished(start: int, part: Batch, found: Scores) -> None:
            nonlocal done
            scores.values[start : start + len(part)] = found.values
            for key, column in found.extras.items():
                scores.extras.setdefault(key, [None] * len(batch))[start : start + len(part)] = column
            advance(len(part))
            done += 1

        async def everything() -> None:
            free = asyncio.Semaphore(self.concurrency)
            async with self.endpoint.client(self.concurrency) as client, asyncio.TaskGroup() as group:
                for start, part in parts:
                    group.create_task(one(client, free, start, part))

        async def one(client: Any, free: asyncio.Semaphore, start: int, part: Batch) -> None:
            async with free:
                finished(start, part, await self._request(client, start, part))

        why = f"{self.name}: {len(parts)} requests for {len(batch)} samples of step {batch.step}"
        run_tasks(everything(), self.endpoint, why, lambda: done)
        return scores

    async def _request(self, client: Any, start: int, part: Batch) -> Scores:
        try:
            body = json.dumps(self._payload(part), allow_nan=False).encode()
        except (TypeError, ValueError) as error:
            raise BadReward(f"cannot be sent as JSON: {error}", start, count=len(part)) from error
        try:
            answer = await self.endpoint.ask(client, body, bytes, f"{self.name} of {part.label()}")
            return self._read(answer, len(part))
        except Unanswered as error:
            raise BadReward(error.problem, start, count=len(part)) from error
        except BadReward as error:
            error.problem = f"{self.endpoint.name} {error.problem}"
            error.count = len(part) if error.position is None else 1
            error.position = start + (error.position or 0)
            raise

    def _payload(self, part: Batch) -> dict[str, Any]:
        return query_batch(part) if self.term.signature == "openrlhf" else conversation_batch(part)

    def _read(self, answer: Answer[bytes], count: int) -> Scores:
        """Raises BadReward, with positions within the request."""
        try:
            result = json.loads(answer.value)
        except (ValueError, RecursionError):
            shown = self.endpoint.shown(answer.value) or "an empty body"
            raise BadReward(f"answered with something that is no JSON: {shown}") from None
        extras: dict[str, Any] = {}
        if isinstance(result, Mapping):
            if "rewards" not in result:
                raise BadReward("answered with an object without 'rewards'", None, result)
            logs = result.get("extra_logs")
            extras = {"scores": result.get("scores"), **(logs if isinstance(logs, Mapping) else {})}
            result = result["rewards"]
        found = Scores(values.rewards(result, count, none_allowed=True))
        for key, value in extras.items():
            column = values.extra_column(value, count)
            if column is not None:
                found.extras[str(key)] = column
        found.extras["latency_s"] = [answer.latency_s] * count
        found.extras["retries"] = [float(answer.retries)] * count
        return found


def run_tasks(body: Any, endpoint: Endpoint, why: str, progress: Any) -> None:
    """Runs a group of requests; what the first failed one raised comes out by itself."""
    bound = endpoint.limits.deadline_s + SLACK_S
    try:
        waits.coroutine(body, kind="http", whom=endpoint.name, why=why, stall_s=bound, progress=progress)
    except BaseExceptionGroup as group:
        raise next(_leaves(group)) from None


def _leaves(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error
