"""This process's connection to a Ray cluster, or to a private Ray started for the run, and bounded calls to it."""

import atexit
import contextlib
import logging
import os
import secrets
import selectors
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray import _raylet

from lockstep.base import waits
from lockstep.base.folders import make_scratch_dir
from lockstep.base.network import check_reachable
from lockstep.base.text import first_line
from lockstep.base.wait_state import WaitTimeout
from lockstep.cluster.placement.reservations import AllocatorUnavailable
from lockstep.cluster.ray.ray_cleanup import end_processes, start_cleanup
from lockstep.config.cluster import RayClusterConfig as Config
from lockstep.watch.procfs import processes

T = TypeVar("T")
log = logging.getLogger(__name__)

RAY_CALL_S = 10.0


class RayUnresponsive(AllocatorUnavailable):
    """Ray does not respond at the moment, or responds with an error."""


class _UnansweredCall:
    """The call that Ray has not answered, if there is one, and its time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: Future[Any] | None = None
        self._since = 0.0

    def still(self) -> float | None:
        """Seconds for which Ray has not responded; None if it responds."""
        with self._lock:
            if self._open is not None and self._open.done():
                self._open = None
                log.warning("Ray responds again, after %.0f s", time.monotonic() - self._since)
            return None if self._open is None else time.monotonic() - self._since

    def begins(self, question: "Future[Any]", since: float, why: str) -> None:
        with self._lock:
            if self._open is None:
                self._open, self._since = question, since
                log.warning(
                    "Ray has not responded for %.0f s (%s): the run continues on its nodes, and nothing is reserved "
                    "until Ray responds", time.monotonic() - since, why,
                )  # fmt: skip


_silence = _UnansweredCall()


def ray_call(call: Callable[[], T], why: str, timeout_s: float = RAY_CALL_S) -> T:
    """Makes a call to Ray in a thread and returns the result. Makes none while an earlier call is unanswered.

    Raises:
        RayUnresponsive: the call did not return in time, or raised one of Ray's errors.
    """
    silent_s = _silence.still()
    if silent_s is not None:
        raise RayUnresponsive(f"Ray has not responded for {silent_s:.0f} s ({why})")
    since, question = time.monotonic(), waits.run_in_thread(call, "calls Ray")
    try:
        return waits.future(question, waits_for="Ray", why=why, timeout_s=timeout_s)
    except ray.exceptions.RayError as error:
        raise RayUnresponsive(f"Ray call failed ({why}): {first_line(error)}") from error
    except WaitTimeout as error:
        _silence.begins(question, since, why)
        raise RayUnresponsive(f"Ray has not responded for {timeout_s:.0f} s ({why})") from error


def reset_unanswered() -> None:
    """Forgets the unanswered call of a session that has ended."""
    global _silence
    _silence = _UnansweredCall()


DIAL_S = 5.0
CONNECT_S = 120.0
"""Ray itself gives up on an unresponsive head after about a minute."""
DISCONNECT_S = 10.0
"""Time limit for closing a connection, as the head may not respond."""
OBJECT_STORE_BYTES = 100 << 20
"""The run puts nothing into Ray's object store."""

_lock = threading.Lock()
_users = 0
_private_ray: "_PrivateRay | None" = None
"""The Ray that this process has started; None if it joined a running one."""
_unfinished: "Future[None] | None" = None
"""The opening or closing of a connection that exceeded its time limit and is still in progress."""


class RayUnavailable(ConnectionError):
    """Ray is not available. Says which Ray, why, and how to fix it."""


@dataclass(frozen=True, slots=True)
class _PrivateRay:
    """A Ray that this process has started."""

    folder: Path
    """Of its sockets and logs."""
    hold: int
    """Descriptor that holds the folder, see `base.folders.hold_folder`."""
    cleanup: "subprocess.Popen[bytes]"

    def remove(self) -> None:
        """Removes what belongs to a Ray that has been shut down."""
        self.cleanup.kill()
        waits.process(self.cleanup, waits_for="process that cleans up", why="it was ended", timeout_s=DISCONNECT_S)
        end_processes(self.folder)
        shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self.hold)


def has_private_ray() -> bool:
    """Whether this process started a private Ray for this host."""
    return _private_ray is not None


def open_session(config: Config, cpus: float, gpus: int) -> None:
    """Joins the Ray cluster that the config names, or starts a private Ray with these CPUs and GPUs. An open session of
    this process is reused. Every call needs one of `close_session`.

    Raises:
        RayUnavailable: with a fix.
    """
    global _users
    with _lock:
        _await_unfinished()
        if not ray.is_initialized():
            _configure_ray()
            address = config.address or os.environ.get("RAY_ADDRESS")
            _connect(address) if address else _start_private_ray(config, cpus, gpus)
        _users += 1


def _await_unfinished() -> None:
    """Waits for an abandoned opening or closing. Raises RayUnavailable."""
    if _unfinished is None or _unfinished.done():
        return
    try:
        waits.future(
            _unfinished, waits_for="Ray", why="an earlier connection of this process ends", timeout_s=CONNECT_S,
            notice_after_s=10.0,
        )  # fmt: skip
    except WaitTimeout as error:
        raise RayUnavailable(f"{error}: start the run in another process") from error
    except (RuntimeError, OSError, ray.exceptions.RayError) as error:
        log.info("an earlier connection failed to close: %s", first_line(error))


def close_session() -> None:
    """Closes the connection when no other part of this process uses it, and stops a private Ray."""
    global _users, _private_ray
    with _lock:
        _users -= 1
        if _users > 0 or not ray.is_initialized():
            return
        _disconnect()
        if _private_ray is not None:
            _reload_auth()
            _private_ray.remove()
            _private_ray = None


def _disconnect() -> None:
    global _unfinished
    _unfinished = waits.run_in_thread(ray.shutdown, "disconnects from Ray")
    try:
        waits.future(_unfinished, waits_for="Ray", why="this process disconnects", timeout_s=DISCONNECT_S)
    except WaitTimeout as error:
        log.warning("%s; the connection is abandoned", error)
    except ray.exceptions.RayError as error:
        log.warning("error while disconnecting from Ray: %s", first_line(error))
    reset_unanswered()


def _configure_ray() -> None:
    """Silences Ray's messages on the driver's console; relevant ones are logged by this package."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # Ray ends a process that has had no contact with the head for a minute; a run continues without it.
    os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", "86400")
    logging.getLogger("ray").setLevel(logging.ERROR)


def _start_private_ray(config: Config, cpus: float, gpus: int) -> None:
    """Starts a Ray of this host alone; it ends with this process in any case (see `ray_cleanup`). It listens on all
    interfaces, so it gets a token that only its own processes know."""
    global _private_ray
    # short: paths of sockets below it are limited to 107 bytes
    folder, hold = make_scratch_dir("lsr-", prepare_removal=end_processes)
    cleanup = start_cleanup(folder)
    period_ms = max(100, round(config.node_lost_after_s * 1000 / 6))
    health = {
        "health_check_period_ms": period_ms, "health_check_timeout_ms": period_ms,
        "health_check_failure_threshold": 3, "health_check_initial_delay_ms": 0,
    }  # fmt: skip
    own_token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_AUTH_TOKEN_PATH": None}
    try:
        with _auth_environment(own_token):
            _run_in_thread(
                lambda: ray.init(
                    address="local", num_cpus=max(1, round(cpus + 0.499)), num_gpus=gpus, include_dashboard=False,
                    object_store_memory=OBJECT_STORE_BYTES, log_to_driver=False, configure_logging=False,
                    _temp_dir=str(folder), _system_config=health,
                ),
                "Ray of this host", "it starts",
            )  # fmt: skip
    except (RuntimeError, OSError, ValueError, WaitTimeout, ray.exceptions.RayError) as error:
        os.close(hold)
        kept = f"its logs are in {folder} until the next start of a private Ray"
        raise RayUnavailable(f"no Ray could be started on this host ({first_line(error)}); {kept}") from error
    except BaseException:
        os.close(hold)
        shutil.rmtree(folder, ignore_errors=True)
        atexit.register(shutil.rmtree, folder, ignore_errors=True)  # for files that Ray writes until it has ended
        raise
    _private_ray = _PrivateRay(folder, hold, cleanup)


@contextlib.contextmanager
def _auth_environment(chosen: Mapping[str, str | None]) -> Iterator[None]:
    """Sets the variables for the authentication between Ray's processes and this one while Ray starts: no other child
    of this process may see them."""
    before = {name: os.environ.get(name) for name in chosen}
    _set_variables(chosen)
    _reload_auth()
    try:
        yield
    finally:
        _set_variables(before)


def _set_variables(variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _reload_auth() -> None:
    """Makes Ray read the variables for authentication again, which it caches."""
    _raylet.Config.initialize("")
    _raylet.AuthenticationTokenLoader.instance().reset_cache()


def _connect(address: str) -> None:
    if "://" in address:
        raise RayUnavailable(
            f"cluster.address {address}: Ray's client cannot start a run's processes. Start lockstep on a node of the "
            "cluster, with HOST:PORT of its head, or hand the run over with --submit"
        )
    if address != "auto":
        _check_listening(address)
    try:
        _run_in_thread(
            lambda: ray.init(address=address, log_to_driver=False, configure_logging=False),
            f"Ray at {address}", "it accepts this process",
        )  # fmt: skip
    except (RuntimeError, OSError, ValueError, WaitTimeout, ray.exceptions.RayError) as error:
        raise RayUnavailable(_connect_error(address, error)) from error


def _check_listening(address: str) -> None:
    """Reports a wrong address within seconds; Ray takes a minute."""
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal():
        raise RayUnavailable(f"cluster.address {address}: expected HOST:PORT of the head of a Ray cluster, or auto")
    try:
        check_reachable(host, int(port), "whether Ray listens there", DIAL_S)
    except OSError as error:
        raise RayUnavailable(
            f"no Ray at {address} ({first_line(error)}). On the head, `ray status` says whether it runs; "
            f"`ray start --head --port={port}` starts it"
        ) from error


def _connect_error(address: str, error: BaseException) -> str:
    """Why the connection failed, with a fix."""
    chain = [error, *(each for each in (error.__cause__, error.__context__) if each is not None)]
    text = " ".join(str(each) for each in chain)
    if isinstance(error, ray.exceptions.AuthenticationError) or "uthentication" in text or "UNAUTHENTICATED" in text:
        return (
            f"Ray at {address} refuses this host's token ({first_line(error)}): set RAY_AUTH_MODE to the same on all "
            "nodes and here (`token`, with the same token in RAY_AUTH_TOKEN or ~/.ray/auth_token, or `disabled`)"
        )
    if "ersion mismatch" in text:
        lines = "; ".join(line.strip() for line in str(error).splitlines() if line.strip())
        return f"{lines}. Install the same Ray and Python here ({socket.gethostname()}) as on the head of {address}"
    if "not find any running Ray" in text:
        return (
            f"no Ray runs on this host ({socket.gethostname()}): start one (`ray start --head`), name the head of "
            "another in cluster.address, or leave it out to have one started for the run"
        )
    if "node is not in the cluster" in text or "find any available" in text or "raylet" in text.lower():
        return (
            f"Ray at {address} responds, but this host ({socket.gethostname()}) is not one of its nodes "
            f"({first_line(error)}): run `ray start --address={address}` here first, or use --submit"
        )
    return f"cannot join Ray at {address}: {first_line(error)}"


def _run_in_thread(work: Callable[[], object], waits_for: str, why: str) -> None:
    """Makes a call without a time limit in a thread, since in the main thread Ray replaces signal handlers. The thread
    stays, because Ray's processes end with the thread that started them. A session that opens after the wait was given
    up is closed again."""
    global _unfinished
    done: Future[None] = Future()
    closed: Future[None] = Future()
    state_lock = threading.Lock()
    given_up = False

    def attempt() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
            done.set_exception(error)
            closed.set_result(None)
            return
        with state_lock:
            done.set_result(None)
            late = given_up
        if late:
            ray.shutdown()
            closed.set_result(None)
            return
        idle = selectors.DefaultSelector()
        while True:
            idle.select(3600.0)

    threading.Thread(target=attempt, name="ray", daemon=True).start()
    try:
        waits.future(
            done, waits_for=waits_for, why=why, stall_s=CONNECT_S,
            progress=lambda: processes.descendants_cpu_s(os.getpid()),
            notice_after_s=10.0,
        )  # fmt: skip
    except BaseException:
        with state_lock:
            given_up, late = True, not done.done()
        if late:
            _unfinished = closed
        elif done.exception() is None:
            _disconnect()
        raise


def ray_get(ref: Any, waits_for: str, why: str, timeout_s: float = CONNECT_S) -> Any:
    """The result of a remote call, with a bound. Raises Ray's errors, WaitTimeout."""
    return waits.future(ref.future(), waits_for=waits_for, why=why, timeout_s=timeout_s)
