"""Runs as Ray jobs: submitted to a cluster's dashboard over HTTP and followed until they end.

Ray's client has no timeouts; each of its calls is made in a thread and waited for with a bound.
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

from lockstep.base import waits
from lockstep.base.wait_state import WaitTimeout, track_wait

T = TypeVar("T")
log = logging.getLogger(__name__)

DASHBOARD_REPLY_S = 30.0
"""Time limit for a request to the dashboard, which may run on a busy machine."""
UPLOAD_S = 600.0
READY_S = 120.0
"""Time limit until the agents of a newly started cluster accept jobs."""
_RETRY_LATER = "try again later"
STATUS_POLL_S = 2.0
"""Interval at which a silent job's status is queried."""
_LOG_END_S = 10.0
"""Time limit for the end of the log, once the job has ended."""
_MAX_UNANSWERED = 10
"""Unanswered requests in a row after which the job is no longer followed."""


class SubmissionError(ConnectionError):
    """The dashboard cannot be reached, or does not accept the job. Names the address and a fix."""


@dataclass(frozen=True, slots=True)
class RayJob:
    """A run that was submitted."""

    address: str
    id: str

    def follow_again(self) -> str:
        """The command that follows the log."""
        return f"ray job logs --follow --address {self.address} {self.id}"

    def stop(self) -> str:
        """The command that stops the job."""
        return f"ray job stop --address {self.address} {self.id}"


@dataclass(frozen=True, slots=True)
class RayJobResult:
    """How a job ended."""

    status: str
    """`SUCCEEDED`, `FAILED` or `STOPPED`."""
    exit_code: int | None
    """Exit code of the job's driver; None if Ray does not know it."""
    message: str


def dashboard_address(address: str) -> str:
    """The dashboard's address in the form that Ray's client accepts.

    Raises:
        SubmissionError: it is not the address of a dashboard.
    """
    scheme, sign, rest = address.rpartition("://")
    if sign and scheme not in ("http", "https"):
        raise SubmissionError(f"{address} is the address of another service of Ray: {_ADDRESS_HINT}")
    if not rest.strip("/"):
        raise SubmissionError(f"{address!r} names no host: {_ADDRESS_HINT}")
    return f"{scheme or 'http'}://{rest.rstrip('/')}"


_ADDRESS_HINT = "name that of the dashboard, such as http://127.0.0.1:8265 (port 8265 of the head)"


def submit_job(
    address: str,
    name: str,
    entrypoint: str,
    folder: Path | None,
    env: Mapping[str, str],
    on_attempt: Callable[[RayJob], None] = lambda job: None,
) -> RayJob:
    """Submits a run.

    Args:
        address: of the dashboard.
        name: of the run; the job's id begins with it.
        folder: becomes the job's working directory.
        env: of the job's driver; readable for all users of the dashboard.
        on_attempt: called with the job before each attempt to submit it.

    Raises:
        SubmissionError: the dashboard does not respond or does not accept the job.
    """
    address = dashboard_address(address)
    client = _client(address)
    runtime: dict[str, Any] = {"env_vars": dict(env)}
    if folder is not None:
        runtime["working_dir"] = str(folder)

    def hand_over() -> RayJob | None:
        job = RayJob(address, _job_id(name))
        call = partial(
            client.submit_job, entrypoint=entrypoint, runtime_env=runtime, submission_id=job.id,
            metadata={"lockstep_run": name},
        )  # fmt: skip
        on_attempt(job)
        try:
            _call_dashboard(call, address, "submit the run", UPLOAD_S)
            return job
        except SubmissionError as error:
            if _RETRY_LATER not in str(error):
                raise
            log.info("%s", error)
            return None

    try:
        why = "it accepts the run: it has said 'try again later'"
        return waits.poll(hand_over, kind="http", waits_for=address, why=why, every_s=STATUS_POLL_S, timeout_s=READY_S)
    except WaitTimeout as error:
        raise SubmissionError(f"cannot submit the run: {error}") from error


def follow_job(job: RayJob, emit: Callable[[str], None]) -> RayJobResult:
    """Passes the job's log to `emit` until the job ends or the dashboard no longer responds. Ctrl-C does not stop the
    job.

    Raises:
        SubmissionError: the dashboard does not respond any more; the job continues.
    """
    client, text = _client(job.address), _LogReader()
    text.begin(client, job)
    unanswered = 0
    while True:
        chunk = text.next(STATUS_POLL_S)
        if chunk:
            emit(chunk)
            continue
        try:
            ended = _job_result(client, job)
        except SubmissionError:
            unanswered += 1
            if unanswered == _MAX_UNANSWERED:
                raise
            continue
        unanswered = 0
        if ended is not None:
            while rest := text.next(_LOG_END_S):
                emit(rest)
            return ended
        if text.broken:
            text.begin(client, job)


class _LogReader:
    """Reads a job's log in a thread. After an error, `begin` reconnects; no text is returned twice."""

    def __init__(self) -> None:
        self.broken = False
        self._passed_on = 0
        self._chunks: queue.Queue[str | None] = queue.Queue()

    def begin(self, client: Any, job: RayJob) -> None:
        self.broken, self._chunks = False, queue.Queue()
        threading.Thread(target=_read_log, args=(client, job, self._chunks, self._passed_on), daemon=True).start()

    def next(self, seconds: float) -> str:
        """The next part; empty if there is none within `seconds`, or at the end."""
        if self.broken:
            waits.sleep(min(seconds, STATUS_POLL_S), "the log's connection was lost")
            return ""
        try:
            chunk = waits.queue_get(self._chunks, waits_for="the job", why="its log", timeout_s=seconds)
        except WaitTimeout:
            return ""
        if chunk is None:
            self.broken = True
            return ""
        self._passed_on += len(chunk)
        return chunk


def _read_log(client: Any, job: RayJob, chunks: "queue.Queue[str | None]", skip: int) -> None:
    """Runs in a thread: puts the log without its first `skip` characters into `chunks`, then None."""

    async def read() -> None:
        left = skip
        async for text in client.tail_job_logs(job.id):
            if len(text) > left:
                chunks.put_nowait(text[left:])
            left = max(0, left - len(text))

    try:
        with track_wait("http", job.address, f"the log of {job.id}, as long as the job runs"):
            asyncio.run(read())
    except Exception as error:  # noqa: BLE001 - any error of Ray's client; the job's status, which is queried next, explains it
        log.debug("the log of %s ended: %s", job.id, error)
    finally:
        chunks.put_nowait(None)


def _job_result(client: Any, job: RayJob) -> RayJobResult | None:
    info = _call_dashboard(lambda: client.get_job_info(job.id), job.address, "query the job", DASHBOARD_REPLY_S)
    if not info.status.is_terminal():
        return None
    return RayJobResult(str(info.status.value), info.driver_exit_code, str(info.message or ""))


def _client(address: str) -> Any:
    try:
        from ray.job_submission import JobSubmissionClient
    except ImportError as error:
        raise SubmissionError(f"--submit needs Ray here as well ({error}): pip install 'lockstep-rl[ray]'") from error
    return _call_dashboard(lambda: JobSubmissionClient(address), address, "reach the dashboard", DASHBOARD_REPLY_S)


def _call_dashboard(call: Callable[[], T], address: str, what: str, limit_s: float) -> T:
    """Makes a call to the dashboard in a thread and returns its result. At the limit the thread is abandoned."""
    try:
        return waits.future(waits.run_in_thread(call, what), waits_for=address, why=what, timeout_s=limit_s)
    except WaitTimeout as error:
        raise SubmissionError(f"cannot {what}: {address} did not answer for {limit_s:g} s; {_ADDRESS_HINT}") from error
    except (ConnectionError, OSError) as error:
        raise SubmissionError(f"cannot {what}: nothing listens at {address}; {_ADDRESS_HINT}") from error
    except (RuntimeError, ValueError) as error:
        raise SubmissionError(
            f"cannot {what}: {address} replied: {_first_lines(error)}{_remedy(str(error))}"
        ) from error


def _first_lines(error: Exception) -> str:
    return " ".join(str(error).split())[:500]


def _remedy(text: str) -> str:
    if any(word in text for word in ("401", "403", "nauthorized", "uthentication")):
        return " - set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN (or RAY_AUTH_TOKEN_PATH) to the cluster's token"
    return ""


def _job_id(name: str) -> str:
    """`name-` and random letters: Ray refuses a repeated id."""
    return f"{name}-{secrets.token_hex(3)}"
