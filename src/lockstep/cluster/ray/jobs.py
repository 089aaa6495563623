"""Runs as Ray jobs: handed to a cluster's dashboard over HTTP, followed until they end.

Ray's client has no time limits of its own; each of its calls is made in a thread and waited for with a bound.
"""

import asyncio
import logging
import queue
import secrets
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from lockstep.watch import waits
from lockstep.watch.bounded import begun
from lockstep.watch.waits import WaitTimeout

T = TypeVar("T")
log = logging.getLogger(__name__)

ANSWER_S = 30.0
"""For a question to the dashboard, on a machine that is busy."""
UPLOAD_S = 600.0
READY_S = 120.0
"""For a cluster that has just been started, until its agents take jobs."""
_LATER = "try again later"
LOOK_S = 2.0
"""How often a silent job is asked whether it has ended."""
_LOG_END_S = 10.0
"""For the end of the log, once the job has ended."""
_PATIENCE = 10
"""Questions in a row that the dashboard may leave open before the job is left alone."""


class SubmissionError(ConnectionError):
    """The dashboard cannot be reached, or does not take the job: address and remedy."""


@dataclass(frozen=True, slots=True)
class Job:
    """A run that was handed over."""

    address: str
    id: str

    def follow_again(self) -> str:
        """The command for it."""
        return f"ray job logs --follow --address {self.address} {self.id}"

    def stop(self) -> str:
        """The command for it."""
        return f"ray job stop --address {self.address} {self.id}"


@dataclass(frozen=True, slots=True)
class Ended:
    """How a job ended."""

    status: str
    """`SUCCEEDED`, `FAILED` or `STOPPED`."""
    exit_code: int | None
    """Of its driver, where Ray knows it."""
    message: str


def dashboard(address: str) -> str:
    """The address as Ray's client wants it.

    Raises:
        SubmissionError: it is not that of a dashboard.
    """
    scheme, sign, rest = address.rpartition("://")
    if sign and scheme not in ("http", "https"):
        raise SubmissionError(f"{address} is the address of another service of Ray: {_WHICH}")
    if not rest.strip("/"):
        raise SubmissionError(f"{address!r} names no host: {_WHICH}")
    return f"{scheme or 'http'}://{rest.rstrip('/')}"


_WHICH = "name that of the dashboard, such as http://127.0.0.1:8265 (port 8265 of the head)"


def submit(
    address: str,
    name: str,
    entrypoint: str,
    folder: Path | None,
    env: Mapping[str, str],
    asked: Callable[[Job], None] = lambda job: None,
) -> Job:
    """Hands a run over.

    Args:
        address: of the dashboard.
        name: of the run; the job's id begins with it.
        folder: becomes the job's working directory.
        env: of the job's driver; shown to everybody who sees the dashboard.
        asked: hears of the job before the dashboard does, again for each attempt.

    Raises:
        SubmissionError: nobody answers there, or the job is not taken.
    """
    address = dashboard(address)
    client = _client(address)
    runtime: dict[str, Any] = {"env_vars": dict(env)}
    if folder is not None:
        runtime["working_dir"] = str(folder)

    def hand_over() -> Job | None:
        job = Job(address, _job_id(name))
        call = partial(
            client.submit_job, entrypoint=entrypoint, runtime_env=runtime, submission_id=job.id,
            metadata={"lockstep_run": name},
        )  # fmt: skip
        asked(job)
        try:
            _bounded(call, address, "hand the run over", UPLOAD_S)
            return job
        except SubmissionError as error:
            if _LATER not in str(error):
                raise
            log.info("%s", error)
            return None

    try:
        why = "it takes the run: it has said 'try again later'"
        return waits.poll(hand_over, kind="http", whom=address, why=why, every_s=LOOK_S, timeout_s=READY_S)
    except WaitTimeout as error:
        raise SubmissionError(f"cannot hand the run over: {error}") from error


def follow(job: Job, emit: Callable[[str], None]) -> Ended:
    """Passes the job's log on until it ends, as long as the dashboard answers. Ctrl-C leaves the job alone.

    Raises:
        SubmissionError: the dashboard does not answer any more; the job goes on.
    """
    client, text = _client(job.address), _Tail()
    text.begin(client, job)
    unanswered = 0
    while True:
        chunk = text.next(LOOK_S)
        if chunk:
            emit(chunk)
            continue
        try:
            ended = _ended(client, job)
        except SubmissionError:
            unanswered += 1
            if unanswered == _PATIENCE:
                raise
            continue
        unanswered = 0
        if ended is not None:
            while rest := text.next(_LOG_END_S):
                emit(rest)
            return ended
        if text.broken:
            text.begin(client, job)


class _Tail:
    """The job's log so far, read by a thread; a connection that breaks is made anew, and nothing is passed on twice."""

    def __init__(self) -> None:
        self.broken = False
        self._passed_on = 0
        self._chunks: queue.Queue[str | None] = queue.Queue()

    def begin(self, client: Any, job: Job) -> None:
        self.broken, self._chunks = False, queue.Queue()
        threading.Thread(target=_read, args=(client, job, self._chunks, self._passed_on), daemon=True).start()

    def next(self, seconds: float) -> str:
        """More of it, empty when nothing came for so long or it is at its end."""
        if self.broken:
            waits.sleep(min(seconds, LOOK_S), "the log's connection was lost")
            return ""
        try:
            chunk = waits.queue_get(self._chunks, whom="the job", why="its log", timeout_s=seconds)
        except WaitTimeout:
            return ""
        if chunk is None:
            self.broken = True
            return ""
        self._passed_on += len(chunk)
        return chunk


def _read(client: Any, job: Job, chunks: "queue.Queue[str | None]", skip: int) -> None:
    """In a thread of its own: the log from its beginning, without the first `skip` characters; None at its end."""

    async def read() -> None:
        left = skip
        async for text in client.tail_job_logs(job.id):
            if len(text) > left:
                chunks.put_nowait(text[left:])
            left = max(0, left - len(text))

    try:
        with waits.waiting("http", job.address, f"the log of {job.id}, as long as the job runs"):
            asyncio.run(read())
    except Exception as error:  # noqa: BLE001 - of a foreign client in its own thread: the next look says what it means
        log.debug("the log of %s ended: %s", job.id, error)
    finally:
        chunks.put_nowait(None)


def _ended(client: Any, job: Job) -> Ended | None:
    info = _bounded(lambda: client.get_job_info(job.id), job.address, "ask how the job is", ANSWER_S)
    if not info.status.is_terminal():
        return None
    return Ended(str(info.status.value), info.driver_exit_code, str(info.message or ""))


def _client(address: str) -> Any:
    try:
        from ray.job_submission import JobSubmissionClient
    except ImportError as error:
        raise SubmissionError(f"--submit needs Ray here as well ({error}): pip install 'lockstep-rl[ray]'") from error
    return _bounded(lambda: JobSubmissionClient(address), address, "reach the dashboard", ANSWER_S)


def _bounded(call: Callable[[], T], address: str, what: str, limit_s: float) -> T:
    """The call's answer. Its thread is left behind when the limit is reached."""
    try:
        return waits.future(begun(call, what), whom=address, why=what, timeout_s=limit_s)
    except WaitTimeout as error:
        raise SubmissionError(f"cannot {what}: {address} did not answer for {limit_s:g} s; {_WHICH}") from error
    except (ConnectionError, OSError) as error:
        raise SubmissionError(f"cannot {what}: nobody listens at {address}; {_WHICH}") from error
    except (RuntimeError, ValueError) as error:
        raise SubmissionError(f"cannot {what}: {address} says: {_first_lines(error)}{_remedy(str(error))}") from error


def _first_lines(error: Exception) -> str:
    return " ".join(str(error).split())[:500]


def _remedy(text: str) -> str:
    if any(word in text for word in ("401", "403", "nauthorized", "uthentication")):
        return " - set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN (or RAY_AUTH_TOKEN_PATH) to the cluster's token"
    return ""


def _job_id(name: str) -> str:
    """`name-` and some random letters: Ray refuses an id twice."""
    return f"{name}-{secrets.token_hex(3)}"
