"""One POST to a server that may refuse, hang, err or talk nonsense: bounded tries, then an error that says which."""

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from ipaddress import ip_address
from typing import Generic, TypeVar

import httpx

from lockstep.watch import waits
from lockstep.watch.secrets import HIDDEN, redact_text

T = TypeVar("T")

LARGEST_ANSWER = 16 << 20
"""Bytes of a body; scores of a batch take thousands."""
SLACK_S = 5.0
"""Beyond `deadline_s`, for what happens around the tries."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0
_WORTH_ANOTHER_TRY = frozenset({408, 425, 429})
_SAME_REQUEST = frozenset({307, 308})
"""Redirects that repeat the POST; the others would turn it into a GET."""
_MOST_REDIRECTS = 3


class Again(Exception):
    """A try failed, and another may not."""

    def __init__(self, problem: str, after_s: float = 0.0) -> None:
        super().__init__(problem)
        self.problem, self.after_s = problem, after_s


class Unanswered(Exception):
    """There is no answer to be had, and why. `last` is what the last try ended with."""

    def __init__(self, problem: str, last: Exception | None = None) -> None:
        super().__init__(problem)
        self.problem, self.last = problem, last


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one request."""

    timeout_s: float
    retries: int
    deadline_s: float


@dataclass(frozen=True, slots=True)
class Answer(Generic[T]):
    value: T
    latency_s: float
    """Of the try that was answered."""
    retries: int


class Endpoint:
    """An address, the key for it, and how often and how long to try."""

    def __init__(self, url: str, key: str | None, limits: Limits) -> None:
        parsed = httpx.URL(url)
        self.url, self.limits, self._key = parsed, limits, key
        self.name = str(parsed.copy_with(query=None, fragment=None))
        """For people: without the query, which may hold what is nobody's business."""
        self._tls = httpx.create_ssl_context() if parsed.scheme == "https" else False
        self._headers = {"content-type": "application/json", "accept-encoding": "identity"}
        if key is not None:
            self._headers["authorization"] = f"Bearer {key}"

    def client(self, connections: int) -> httpx.AsyncClient:
        """For the event loop it is first used in. Proxies of the environment are for the world outside."""
        return httpx.AsyncClient(
            timeout=self.limits.timeout_s,
            verify=self._tls,
            trust_env=not _loopback(self.url.host),
            limits=httpx.Limits(max_connections=connections),
            follow_redirects=False,
        )

    async def ask(self, client: httpx.AsyncClient, body: bytes, read: Callable[[bytes], T], what: str) -> Answer[T]:
        """The server's answer to the POST, as `read` takes it from the body; `read` may raise Again.

        Raises Unanswered after the last try, at the deadline, or at once where no try could help."""
        limits, began = self.limits, time.monotonic()
        for number in range(limits.retries + 1):
            left = began + limits.deadline_s - time.monotonic()
            label = what if number == 0 else f"{what}, try {number + 1} of {limits.retries + 1}"
            try:
                return await self._try(client, body, read, label, min(limits.timeout_s, left), number)
            except Again as error:
                last = error
            if number == limits.retries:
                break
            pause = max(last.after_s, backoff_s(number))
            if time.monotonic() + pause >= began + limits.deadline_s:
                asked = f", and asks to wait {last.after_s:g} s" if last.after_s else ""
                raise self._unanswered(f"{last.problem}{asked}; deadline_s {limits.deadline_s:g} allows no more", last)
            with waits.waiting("http", self.name, f"{what}: {last.problem}; then once more", pause):
                await asyncio.sleep(pause)
        tries = f" ({limits.retries + 1} tries)" if limits.retries else ""
        raise self._unanswered(f"{last.problem}{tries}", last)

    async def _try(
        self, client: httpx.AsyncClient, body: bytes, read: Callable[[bytes], T], what: str, bound_s: float, number: int
    ) -> Answer[T]:
        began = time.monotonic()
        with waits.waiting("http", self.name, what, bound_s):
            try:
                async with asyncio.timeout(bound_s):
                    content = await self._post(client, body)
            except TimeoutError:
                raise Again(f"did not answer within {bound_s:.3g} s") from None
            except httpx.ConnectError as error:
                raise Again(f"cannot be reached ({error})") from error
            except httpx.TransportError as error:
                raise Again(f"broke off ({type(error).__name__}: {error})") from error
        return Answer(read(content), time.monotonic() - began, number)

    async def _post(self, client: httpx.AsyncClient, body: bytes) -> bytes:
        url = self.url
        for _ in range(_MOST_REDIRECTS + 1):
            async with client.stream("POST", url, content=body, headers=self._headers) as response:
                if not response.has_redirect_location:
                    content = await self._body(response)
                    self._check_status(response, content)
                    return content
                target = url.join(response.headers["location"])
            if response.status_code not in _SAME_REQUEST or _origin(target) != _origin(url):
                shown = target.copy_with(query=None, fragment=None)
                raise self._unanswered(
                    f"answered {response.status_code}, a redirect to {shown}, which is not followed; give that address"
                )
            url = target
        raise self._unanswered(f"redirects in a circle (after {_MOST_REDIRECTS} redirects)")

    async def _body(self, response: httpx.Response) -> bytes:
        if response.headers.get("content-encoding", "identity") != "identity":
            raise self._unanswered("answered with a compressed body, which was not asked for")
        parts, size = [], 0
        async for part in response.aiter_raw():
            parts.append(part)
            size += len(part)
            if size > LARGEST_ANSWER:
                raise self._unanswered(f"answered with more than {LARGEST_ANSWER >> 20} MiB")
        return b"".join(parts)

    def _check_status(self, response: httpx.Response, content: bytes) -> None:
        status = response.status_code
        if 200 <= status < 300:
            return
        said = self.shown(content)
        problem = f"answered {status} {response.reason_phrase}".rstrip() + (f": {said}" if said else "")
        if status in _WORTH_ANOTHER_TRY or status >= 500:
            raise Again(problem, retry_after_s(response.headers.get("retry-after")))
        if status in (401, 403):
            problem += "; is the key in the variable that api_key_env names the right one?"
        raise self._unanswered(problem)

    def shown(self, content: bytes | str, limit: int = 200) -> str:
        """The beginning of what a server said, on one line, without the key that it may repeat."""
        text = content.decode(errors="replace") if isinstance(content, bytes) else content
        text = " ".join(text[: 10 * limit].split())
        text = redact_text(text.replace(self._key, HIDDEN) if self._key else text)
        return text if len(text) <= limit else f"{text[:limit]} ..."

    def _unanswered(self, problem: str, last: Exception | None = None) -> Unanswered:
        return Unanswered(f"{self.name} {problem}", last)


def backoff_s(number: int) -> float:
    """Seconds to wait after the failed try of this number, from 0: doubling, half of it drawn, so that clients that
    failed together do not come back together."""
    longest = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2.0**number)
    return longest * random.uniform(0.5, 1.0)


def retry_after_s(header: str | None) -> float:
    """Seconds that a `Retry-After` header asks for (a number or a date, RFC 9110 10.2.3); 0 for none or nonsense."""
    if header is None:
        return 0.0
    try:
        return max(0.0, float(header)) if header.strip().isdigit() else _until(header)
    except (ValueError, OverflowError):
        return 0.0


def _until(date: str) -> float:
    return max(0.0, parsedate_to_datetime(date).timestamp() - time.time())


def _origin(url: httpx.URL) -> tuple[str, str, int | None]:
    return url.scheme, url.host, url.port


def _loopback(host: str) -> bool:
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False
