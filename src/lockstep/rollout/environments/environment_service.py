"""An environment process: runs the user's code in isolation."""

import asyncio
import contextlib
import inspect
import logging
import os
import resource
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import psutil

from lockstep.base.wait_state import track_wait
from lockstep.cluster.protocol import concurrent
from lockstep.cluster.user_code import UserCodeError, Watchdog, load_object, user_traceback
from lockstep.config.rollout import EnvironmentConfig as Config
from lockstep.rollout.environments.environment_protocol import (
    EnvironmentCodeError,
    EnvironmentFailure,
    EnvironmentTask,
    LoadedEnvironment,
    Observation,
    ObservationLimits,
    RunningTask,
    TaskResult,
    TaskUpdate,
    to_observation,
)
from lockstep.rollout.environments.tools import ToolEnvironment, reset_environment
from lockstep.watch.beacon.writer import current_beacon

log = logging.getLogger(__name__)

SLICE_S = 0.02
"""How long async methods run before calls of the controller are processed."""
NICENESS = 5
"""Gives trainer and engines priority on shared cores."""


class EnvironmentService:
    """Implements `EnvironmentAPI`.

    Args:
        config: the section `rollout.environment`, dumped.
        base: folder that paths in the config are relative to.
    """

    def __init__(self, config: dict[str, Any], base: str) -> None:
        self._config, self._base = Config.model_validate(config), Path(base)
        self._make_environment: Callable[[], Any] = _not_prepared
        self._environments: dict[str, Any] = {}
        """The environment of each open episode."""
        self._inbox: deque[EnvironmentTask] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._runner = asyncio.Runner()
        self._loop = self._runner.get_loop()
        self._task_done: asyncio.Future[None] = self._loop.create_future()
        """Set when a task ends during a slice."""
        self._watchdog = Watchdog(0.8 * self._config.timeout_s)
        self._lock = threading.Lock()
        """Guards the attributes below, which `collect` reads in the I/O thread."""
        self._running: dict[int, float] = {}
        """When each running task began, by task number."""
        self._results: deque[TaskResult] = deque()
        """Results that are not acknowledged yet."""
        self._sequence = 0
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.nice(NICENESS)

    def prepare(self) -> LoadedEnvironment:
        config, beacon = self._config, current_beacon()
        beacon.stage("loading")
        try:
            if config.path is not None:
                factory = load_object(config.path, self._base, EnvironmentCodeError)
                if not callable(factory) or not callable(getattr(factory, "step", None)):
                    raise EnvironmentCodeError(config.path, "is not a class with a method step(action)")
                arguments = dict(config.arguments)
                self._make_environment = lambda: factory(**arguments)
                prepared = LoadedEnvironment(resets=hasattr(factory, "reset"), role="user")
            else:
                functions = {path.rpartition(":")[2]: self._load_tool(path) for path in config.tools}
                self._make_environment = lambda: ToolEnvironment(functions, config)
                prepared = LoadedEnvironment(resets=False, role="tool")
        except UserCodeError as error:
            return LoadedEnvironment(failure=EnvironmentFailure(str(error), error.traceback))
        too_small = self._limit_memory()
        beacon.stage("ready")
        return LoadedEnvironment(failure=EnvironmentFailure(too_small)) if too_small else prepared

    def submit(self, tasks: list[EnvironmentTask]) -> None:
        self._inbox.extend(tasks)

    def forget(self, episodes: list[str]) -> None:
        for episode in episodes:
            close = getattr(self._environments.pop(episode, None), "close", None)
            if callable(close):
                try:
                    with track_wait("async function", "environments", "close()", self._config.timeout_s):
                        self._runner.run(_await_with_limit(close(), self._config.timeout_s))
                except Exception:
                    log.exception("close() of %s failed", episode)

    @concurrent
    def collect(self, ack: int = 0) -> TaskUpdate:
        now, current = time.monotonic(), asyncio.current_task(self._loop)
        holding = None if current is None else current.get_name()
        with self._lock:
            while self._results and self._sequence - len(self._results) < ack:
                self._results.popleft()
            running = [RunningTask(n, now - since, str(n) == holding) for n, since in self._running.items()]
            return TaskUpdate(self._sequence, list(self._results), running)

    def background(self) -> bool:
        """Starts all queued tasks and lets them run for a moment. Returns whether there is more to do.

        Plain functions run one after the other, and their results arrive together, so that engines start the next turns
        together.
        """
        while self._inbox:
            queued = self._inbox.popleft()
            self._tasks.add(self._loop.create_task(self._run_task(queued), name=str(queued.number)))
        if self._tasks:
            self._watchdog.pat()  # so it fires only if a method blocks the process
            with track_wait("async function", "environments", "their answers", SLICE_S):
                self._runner.run(self._run_slice())
            for task in [task for task in self._tasks if task.done()]:
                self._tasks.discard(task)
                if (error := task.exception()) is not None:
                    raise error
        if not self._tasks:
            self._watchdog.stop()
        return bool(self._inbox or self._tasks)

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        self._runner.close()

    async def _run_slice(self) -> None:
        """Lets tasks run until one of them is done, or for SLICE_S."""
        self._task_done = self._loop.create_future()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SLICE_S):
                await self._task_done

    async def _run_task(self, task: EnvironmentTask) -> None:
        """Runs a task and keeps its result. An exception of the user's code becomes a result too."""
        with self._lock:
            self._running[task.number] = time.monotonic()
        limit = asyncio.timeout(self._config.timeout_s)
        try:
            async with limit:
                result = await self._call_environment(task)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - reported with its traceback
            problem = f"raised {type(error).__name__}: {error}"
            if limit.expired():
                problem = f"did not answer within {self._config.timeout_s:g} s (rollout.environment.timeout_s)"
            elif isinstance(error, MemoryError):
                problem = "ran out of memory (rollout.environment.memory_mb limits its process)"
            result = TaskResult(task.number, failure=EnvironmentFailure(problem, user_traceback(error)))
        current_beacon().add("answers", 1)
        with self._lock:
            del self._running[task.number]
            self._results.append(result)
            self._sequence += 1
        if not self._task_done.done():
            self._task_done.set_result(None)

    async def _call_environment(self, task: EnvironmentTask) -> TaskResult:
        """Calls `reset` or `step`, in a new environment after the earlier actions if the process has none."""
        if task.episode not in self._environments:
            assert task.prompt is not None
            environment = self._make_environment()
            if task.begun is not None or task.action is None:
                first = self._observation(await _maybe_await(reset_environment(environment, task.prompt)), "reset")
                if task.begun is not None:
                    _check_same_observation(task.begun, first, "reset")
            for earlier in task.history:
                again = self._observation(await _maybe_await(environment.step(earlier.action)), "step")
                _check_same_observation(earlier.digest, again, "step")
            self._environments[task.episode] = environment
            if task.action is None:
                return TaskResult(task.number, first, digest=observation_digest(first))
        assert task.action is not None
        reply = self._observation(await _maybe_await(self._environments[task.episode].step(task.action)), "step")
        return TaskResult(task.number, reply, digest=observation_digest(reply))

    def _observation(self, value: object, method: str) -> Observation:
        return to_observation(value, method, ObservationLimits(self._base, self._config.max_images))

    def _load_tool(self, path: str) -> Callable[..., Any]:
        loaded = load_object(path, self._base, EnvironmentCodeError)
        if not callable(loaded) or inspect.isclass(loaded):
            raise EnvironmentCodeError(path, "is not a function")
        function: Callable[..., Any] = loaded
        return function

    def _limit_memory(self) -> str | None:
        """Limits the address space, after the user's code is loaded. Returns an error if the limit is too small."""
        limit_mb = self._config.memory_mb
        if limit_mb is None:
            return None
        used_mb = psutil.Process().memory_info().vms / 2**20
        if used_mb + 32 > limit_mb:
            return (
                f"the process uses {used_mb:.0f} MiB of address space before its first conversation; set "
                f"rollout.environment.memory_mb to at least {used_mb + 256:.0f} (it is {limit_mb})"
            )
        resource.setrlimit(resource.RLIMIT_AS, (limit_mb * 2**20, limit_mb * 2**20))
        return None


class NondeterministicEnvironment(RuntimeError):
    """An environment returned different observations for the same prompt and actions."""


def observation_digest(observation: Observation) -> int:
    return zlib.crc32(msgspec.json.encode(observation))


def _check_same_observation(digest: int, repeated: Observation, method: str) -> None:
    if observation_digest(repeated) != digest:
        raise NondeterministicEnvironment(
            f"{method} returned another observation than before for the same prompt and actions. Environments must be "
            "deterministic: calls are repeated when a process is lost or a conversation branches. Derive random "
            "numbers from the prompt."
        )


async def _maybe_await(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


async def _await_with_limit(value: Any, seconds: float) -> None:
    async with asyncio.timeout(seconds):
        await _maybe_await(value)


def _not_prepared() -> Any:
    raise RuntimeError("prepare() was not called")
