"""A reward that an HTTP server computes, with bounded retries.

A request has the completions of a part of the batch, as JSON in the format of the term's `signature`:

    trl       {"prompts": [...], "completions": [...], "COLUMN": [...], ...}
    openrlhf  {"query": [...], "prompts": [...], "labels": [...]}      query is prompt and completion in one text

The answer is `[1.0, ...]`, or `{"rewards": [1.0, ...], "scores": [...], "extra_logs": {"KEY": [...]}}`, one
number per completion in their order; null for a completion to which the term does not apply.
"""

import asyncio
import json
import random
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from ipaddress import ip_address
from typing import Any, Generic, TypeVar

import httpx

from lockstep.base import waits
from lockstep.base.json_text import MalformedJson, parse_json
from lockstep.base.secrets import HIDDEN, redact_text
from lockstep.base.text import count_noun
from lockstep.base.wait_state import track_wait
from lockstep.config.reward import HttpReward, ModelReward
from lockstep.rewards import reward_values
from lockstep.rewards.reward_functions import ReportScored, conversation_batch, query_batch
from lockstep.rewards.reward_values import BadReward
from lockstep.rewards.scoring_messages import ScoringBatch, TermScores, read_api_key

T = TypeVar("T")

MAX_RESPONSE_BYTES = 16 << 20
"""The largest size of an answer. Scores of a batch take a few thousand bytes."""
REQUEST_SLACK_S = 5.0
"""Added to `deadline_s` for the work around the attempts."""
_FIRST_BACKOFF_S, _LONGEST_BACKOFF_S = 0.5, 30.0
_RETRYABLE_STATUS = frozenset({408, 425, 429})
_POST_REDIRECTS = frozenset({307, 308})
"""Redirects after which the POST is repeated. The others would turn it into a GET."""
_MAX_REDIRECTS = 3


class RetryableRequestError(Exception):
    """An attempt failed, and a retry may succeed."""

    def __init__(self, problem: str, after_s: float = 0.0) -> None:
        super().__init__(problem)
        self.problem, self.after_s = problem, after_s


class RequestFailed(Exception):
    """The request failed, and a retry cannot help or is not allowed. `last` is the error of the last attempt."""

    def __init__(self, problem: str, last: Exception | None = None) -> None:
        super().__init__(problem)
        self.problem, self.last = problem, last


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Limits of one request."""

    timeout_s: float
    retries: int
    deadline_s: float


@dataclass(frozen=True, slots=True)
class ServerAnswer(Generic[T]):
    """The answer to a request."""

    value: T
    latency_s: float
    """Latency of the successful attempt."""
    retries: int


class HttpEndpoint:
    """A server's address, its key, and the limits of requests to it."""

    def __init__(self, url: str, key: str | None, limits: RequestLimits) -> None:
        parsed = httpx.URL(url)
        self.url, self.limits, self._key = parsed, limits, key
        self.name = str(parsed.copy_with(query=None, fragment=None))
        """The address in messages, without the query, which may hold secrets."""
        self._tls = httpx.create_ssl_context() if parsed.scheme == "https" else False
        self._headers = {"content-type": "application/json", "accept-encoding": "identity"}
        if key is not None:
            self._headers["authorization"] = f"Bearer {key}"

    def client(self, connections: int) -> httpx.AsyncClient:
        """Makes a client for the event loop that first uses it. Proxies of the environment do not apply to loopback."""
        return httpx.AsyncClient(
            timeout=self.limits.timeout_s,
            verify=self._tls,
            trust_env=not _is_loopback(self.url.host),
            limits=httpx.Limits(max_connections=connections),
            follow_redirects=False,
        )

    async def ask(
        self, client: httpx.AsyncClient, body: bytes, read: Callable[[bytes], T], what: str
    ) -> ServerAnswer[T]:
        """Posts the body and returns the answer, with retries.

        Args:
            read: parses the answer; may raise RetryableRequestError.
            what: what is requested, in messages.

        Raises:
            RequestFailed: after the last attempt, at the deadline, or at once if a retry cannot help.
        """
        limits, began = self.limits, time.monotonic()
        for number in range(limits.retries + 1):
            remaining_s = began + limits.deadline_s - time.monotonic()
            label = what if number == 0 else f"{what}, attempt {number + 1} of {limits.retries + 1}"
            try:
                return await self._attempt(client, body, read, label, min(limits.timeout_s, remaining_s), number)
            except RetryableRequestError as error:
                last = error
            if number == limits.retries:
                break
            pause = max(last.after_s, backoff_s(number))
            if time.monotonic() + pause >= began + limits.deadline_s:
                wait = f", and asks to wait {last.after_s:g} s" if last.after_s else ""
                raise self._failed(f"{last.problem}{wait}; deadline_s {limits.deadline_s:g} allows no more", last)
            with track_wait("http", self.name, f"{what}: {last.problem}; retrying", pause):
                await asyncio.sleep(pause)
        tries = f" ({limits.retries + 1} attempts)" if limits.retries else ""
        raise self._failed(f"{last.problem}{tries}", last)

    async def _attempt(
        self, client: httpx.AsyncClient, body: bytes, read: Callable[[bytes], T], what: str, bound_s: float, number: int
    ) -> ServerAnswer[T]:
        began = time.monotonic()
        with track_wait("http", self.name, what, bound_s):
            try:
                async with asyncio.timeout(bound_s):
                    content = await self._post(client, body)
            except TimeoutError:
                raise RetryableRequestError(f"did not answer within {bound_s:.3g} s") from None
            except httpx.ConnectError as error:
                raise RetryableRequestError(f"cannot be reached ({error})") from error
            except httpx.TransportError as error:
                raise RetryableRequestError(f"broke the connection ({type(error).__name__}: {error})") from error
        return ServerAnswer(read(content), time.monotonic() - began, number)

    async def _post(self, client: httpx.AsyncClient, body: bytes) -> bytes:
        url = self.url
        for _ in range(_MAX_REDIRECTS + 1):
            async with client.stream("POST", url, content=body, headers=self._headers) as response:
                if not response.has_redirect_location:
                    content = await self._read_body(response)
                    self._check_status(response, content)
                    return content
                target = url.join(response.headers["location"])
            if response.status_code not in _POST_REDIRECTS or _origin(target) != _origin(url):
                address = target.copy_with(query=None, fragment=None)
                raise self._failed(
                    f"answered {response.status_code}, a redirect to {address}, which is not followed; use that address"
                )
            url = target
        raise self._failed(f"redirects in a circle (after {_MAX_REDIRECTS} redirects)")

    async def _read_body(self, response: httpx.Response) -> bytes:
        if response.headers.get("content-encoding", "identity") != "identity":
            raise self._failed("answered with a compressed body although the request excludes that")
        parts, size = [], 0
        async for part in response.aiter_raw():
            parts.append(part)
            size += len(part)
            if size > MAX_RESPONSE_BYTES:
                raise self._failed(f"answered with more than {MAX_RESPONSE_BYTES >> 20} MiB")
        return b"".join(parts)

    def _check_status(self, response: httpx.Response, content: bytes) -> None:
        status = response.status_code
        if 200 <= status < 300:
            return
        excerpt = self.excerpt(content)
        problem = f"answered {status} {response.reason_phrase}".rstrip() + (f": {excerpt}" if excerpt else "")
        if status in _RETRYABLE_STATUS or status >= 500:
            raise RetryableRequestError(problem, retry_after_s(response.headers.get("retry-after")))
        if status in (401, 403):
            problem += "; check the key in the variable that api_key_env names"
        raise self._failed(problem)

    def excerpt(self, content: bytes | str, limit: int = 200) -> str:
        """The beginning of an answer on one line, with the key redacted, for messages."""
        text = content.decode(errors="replace") if isinstance(content, bytes) else content
        text = " ".join(text[: 10 * limit].split())
        text = redact_text(text.replace(self._key, HIDDEN) if self._key else text)
        return text if len(text) <= limit else f"{text[:limit]} ..."

    def _failed(self, problem: str, last: Exception | None = None) -> RequestFailed:
        return RequestFailed(f"{self.name} {problem}", last)


def backoff_s(number: int) -> float:
    """Seconds to wait after failed attempt `number` (from 0). They grow exponentially, and up to half is random, so
    that clients that failed together do not retry together."""
    longest = min(_LONGEST_BACKOFF_S, _FIRST_BACKOFF_S * 2.0**number)
    return longest * random.uniform(0.5, 1.0)


def retry_after_s(header: str | None) -> float:
    """Seconds that a `Retry-After` header asks for (a number or a date, RFC 9110 10.2.3); 0 without a valid header."""
    if header is None:
        return 0.0
    try:
        return max(0.0, float(header)) if header.strip().isdigit() else _seconds_until(header)
    except (ValueError, OverflowError):
        return 0.0


def _seconds_until(date: str) -> float:
    return max(0.0, parsedate_to_datetime(date).timestamp() - time.time())


def _origin(url: httpx.URL) -> tuple[str, str, int | None]:
    return url.scheme, url.host, url.port


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


class HttpTerm:
    """A reward term of kind http."""

    def __init__(self, term: HttpReward | ModelReward, name: str, concurrency: int) -> None:
        self.term, self.name, self.concurrency = term, name, concurrency
        assert term.url is not None
        limits = RequestLimits(term.timeout_s, term.retries, term.deadline_s)
        self.endpoint = HttpEndpoint(term.url, read_api_key(term.api_key_env, name), limits)

    def score(self, batch: ScoringBatch, advance: ReportScored) -> TermScores:
        """One request per `batch_size` samples, `concurrency` at once. The first failure cancels the others."""
        scores = TermScores([None] * len(batch))
        parts = self._parts(batch)
        done = 0

        def add_scores(start: int, part: ScoringBatch, part_scores: TermScores) -> None:
            nonlocal done
            scores.values[start : start + len(part)] = part_scores.values
            for key, column in part_scores.extras.items():
                scores.extras.setdefault(key, [None] * len(batch))[start : start + len(part)] = column
            advance(len(part))
            done += 1

        async def score_all() -> None:
            free = asyncio.Semaphore(self.concurrency)
            async with self.endpoint.client(self.concurrency) as client, asyncio.TaskGroup() as group:
                for start, part in parts:
                    group.create_task(score_part(client, free, start, part))

        async def score_part(client: Any, free: asyncio.Semaphore, start: int, part: ScoringBatch) -> None:
            async with free:
                add_scores(start, part, await self._request(client, start, part))

        requests, samples = count_noun(len(parts), "request"), count_noun(len(batch), "sample")
        why = f"{self.name}: {requests} for {samples} after {count_noun(batch.step, 'step')}"
        run_requests(score_all(), self.endpoint, why, lambda: done)
        return scores

    def _parts(self, batch: ScoringBatch) -> list[tuple[int, ScoringBatch]]:
        """The samples of each request, with the position of the first one."""
        size = self.term.batch_size
        return [(start, batch.part(start, size)) for start in range(0, len(batch), size)]

    async def _request(self, client: Any, start: int, part: ScoringBatch) -> TermScores:
        try:
            body = json.dumps(self._payload(part), allow_nan=False).encode()
        except BadReward as error:
            error.position = start + (error.position or 0)
            raise
        except (TypeError, ValueError) as error:
            raise BadReward(f"cannot be sent as JSON: {error}", start, count=len(part)) from error
        try:
            answer = await self.endpoint.ask(client, body, bytes, f"{self.name} of {part.label()}")
            return self._parse_answer(answer, len(part))
        except RequestFailed as error:
            raise BadReward(error.problem, start, count=len(part)) from error
        except BadReward as error:
            error.problem = f"{self.endpoint.name} {error.problem}"
            error.count = len(part) if error.position is None else 1
            error.position = start + (error.position or 0)
            raise

    def _payload(self, part: ScoringBatch) -> dict[str, Any]:
        """The body of a request. Raises BadReward, with positions within the request."""
        openrlhf = isinstance(self.term, HttpReward) and self.term.signature == "openrlhf"
        return query_batch(part) if openrlhf else conversation_batch(part)

    def _parse_answer(self, answer: ServerAnswer[bytes], count: int) -> TermScores:
        """Returns the scores in an answer. Raises BadReward, with positions within the request."""
        try:
            result = parse_json(answer.value, "the answer")
        except MalformedJson:
            excerpt = self.endpoint.excerpt(answer.value) or "an empty body"
            raise BadReward(f"answered with something other than JSON: {excerpt}") from None
        extras: dict[str, Any] = {}
        if isinstance(result, Mapping):
            if "rewards" not in result:
                raise BadReward("answered with an object without 'rewards'", None, result)
            logs = result.get("extra_logs")
            extras = {"scores": result.get("scores"), **(logs if isinstance(logs, Mapping) else {})}
            result = result["rewards"]
        scores = TermScores(reward_values.check_rewards(result, count, none_allowed=True))
        for key, value in extras.items():
            column = reward_values.check_extra_column(value, count)
            if column is not None:
                scores.extras[str(key)] = column
        scores.extras["latency_s"] = [answer.latency_s] * count
        scores.extras["retries"] = [float(answer.retries)] * count
        return scores


def run_requests(body: Any, endpoint: HttpEndpoint, why: str, progress: Any) -> None:
    """Runs a group of requests. Raises the error of the first one that failed."""
    bound = endpoint.limits.deadline_s + REQUEST_SLACK_S
    try:
        waits.coroutine(body, kind="http", waits_for=endpoint.name, why=why, stall_s=bound, progress=progress)
    except BaseExceptionGroup as group:
        raise next(_leaf_errors(group)) from None


def _leaf_errors(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaf_errors(error)
        else:
            yield error
