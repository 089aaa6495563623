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
from lockstep.rollout.environments.environment_messages import (
    EnvironmentCodeError,
    EnvironmentFailure,
    EnvironmentTask,
    LoadedEnvironment,
    RunningTask,
    TaskResult,
    TaskUpdate,
)
from lockstep.rollout.environments.environment_protocol import Observation, to_observation
from lockstep.rollout.environments.tools import ToolEnvironment, reset_environment
from lockstep.watch.beacon.writer import current_beacon

log = logging.getLogger(__name__)

SLICE_S = 0.02
"""How long async methods run before calls of the controller are processed."""
NICENESS = 5


class EnvironmentService:
    """Implements `EnvironmentAPI`.

    Args:
        config: the section `rollout.environment`, dumped.
        base: folder that paths are relative to.
    """

    def __init__(self, config: dict[str, Any], base: str) -> None:
        self._config, self._base = Config.model_validate(config), Path(base)
        self._make: Callable[[], Any] = _no_result
        self._open: dict[str, Any] = {}
        self._inbox: deque[EnvironmentTask] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._runner = asyncio.Runner()
        self._loop = self._runner.get_loop()
        self._woken: asyncio.Future[None] = self._loop.create_future()
        self._watchdog = Watchdog(0.8 * self._config.timeout_s)
        self._lock = threading.Lock()
        """Guards what `collect` reads in the I/O thread."""
        self._running: dict[int, float] = {}
        self._kept: deque[TaskResult] = deque()
        self._sequence = 0
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.nice(NICENESS)

    def prepare(self) -> LoadedEnvironment:
        config, here = self._config, current_beacon()
        here.stage("loading")
        try:
            if config.path is not None:
                made = load_object(config.path, self._base, EnvironmentCodeError)
                if not callable(made) or not callable(getattr(made, "step", None)):
                    raise EnvironmentCodeError(config.path, "is not a class with a method step(action)")
                arguments = dict(config.arguments)
                self._make = lambda: made(**arguments)
                prepared = LoadedEnvironment(resets=hasattr(made, "reset"), role="user")
            else:
                functions = {path.rpartition(":")[2]: self._tool(path) for path in config.tools}
                self._make = lambda: ToolEnvironment(functions, config)
                prepared = LoadedEnvironment(resets=False, role="tool")
        except UserCodeError as error:
            return LoadedEnvironment(failure=EnvironmentFailure(str(error), error.traceback))
        too_small = self._limit_memory()
        here.stage("ready")
        return LoadedEnvironment(failure=EnvironmentFailure(too_small)) if too_small else prepared

    def submit(self, tasks: list[EnvironmentTask]) -> None:
        self._inbox.extend(tasks)

    def forget(self, episodes: list[str]) -> None:
        for episode in episodes:
            close = getattr(self._open.pop(episode, None), "close", None)
            if callable(close):
                try:
                    with track_wait("async function", "environments", "close()", self._config.timeout_s):
                        self._runner.run(_finished(close(), self._config.timeout_s))
                except Exception:
                    log.exception("close() of %s failed", episode)

    @concurrent
    def collect(self, ack: int = 0) -> TaskUpdate:
        now, holder = time.monotonic(), asyncio.current_task(self._loop)
        holding = None if holder is None else holder.get_name()
        with self._lock:
            while self._kept and self._sequence - len(self._kept) < ack:
                self._kept.popleft()
            running = [RunningTask(n, now - since, str(n) == holding) for n, since in self._running.items()]
            return TaskUpdate(self._sequence, list(self._kept), running)

    def background(self) -> bool:
        """Starts all queued tasks and lets them run for a moment; whether there is more to do. Plain functions run one
        after the other, and their results arrive together, so that engines start the next turns together."""
        while self._inbox:
            queued = self._inbox.popleft()
            self._tasks.add(self._loop.create_task(self._run_task(queued), name=str(queued.number)))
        if self._tasks:
            self._watchdog.pat()  # it acts only if a method blocks the process
            with track_wait("async function", "environments", "their answers", SLICE_S):
                self._runner.run(self._slice())
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

    async def _slice(self) -> None:
        """Lets tasks run until one of them is done, or for SLICE_S."""
        self._woken = self._loop.create_future()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SLICE_S):
                await self._woken

    async def _run_task(self, task: EnvironmentTask) -> None:
        """Runs a task; any failure of the user's code becomes a result, unless it blocks the process."""
        with self._lock:
            self._running[task.number] = time.monotonic()
        limit = asyncio.timeout(self._config.timeout_s)
        try:
            async with limit:
                answer = await self._answer(task)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - reported with its traceback
            problem = f"raised {type(error).__name__}: {error}"
            if limit.expired():
                problem = f"did not answer within {self._config.timeout_s:g} s (rollout.environment.timeout_s)"
            elif isinstance(error, MemoryError):
                problem = "ran out of memory (rollout.environment.memory_mb limits its process)"
            answer = TaskResult(task.number, failure=EnvironmentFailure(problem, user_traceback(error)))
        current_beacon().add("answers", 1)
        with self._lock:
            del self._running[task.number]
            self._kept.append(answer)
            self._sequence += 1
        if not self._woken.done():
            self._woken.set_result(None)

    async def _answer(self, task: EnvironmentTask) -> TaskResult:
        if task.episode not in self._open:
            assert task.prompt is not None
            environment = self._make()
            if task.begun is not None or task.action is None:
                first = to_observation(await _awaited(reset_environment(environment, task.prompt)), "reset")
                if task.begun is not None:
                    _check_same_observation(task.begun, first, "reset")
            for deed in task.history:
                again = to_observation(await _awaited(environment.step(deed.action)), "step")
                _check_same_observation(deed.digest, again, "step")
            self._open[task.episode] = environment
            if task.action is None:
                return TaskResult(task.number, first, digest=observation_digest(first))
        assert task.action is not None
        found = to_observation(await _awaited(self._open[task.episode].step(task.action)), "step")
        return TaskResult(task.number, found, digest=observation_digest(found))

    def _tool(self, path: str) -> Callable[..., Any]:
        found = load_object(path, self._base, EnvironmentCodeError)
        if not callable(found) or inspect.isclass(found):
            raise EnvironmentCodeError(path, "is no function")
        function: Callable[..., Any] = found
        return function

    def _limit_memory(self) -> str | None:
        """Limits the address space, after loading; returns why if the limit is too small."""
        limit_mb = self._config.memory_mb
        if limit_mb is None:
            return None
        used_mb = psutil.Process().memory_info().vms / 2**20
        if used_mb + 32 > limit_mb:
            return (
                f"the process takes {used_mb:.0f} MiB of address space before its first conversation; set "
                f"rollout.environment.memory_mb to at least {used_mb + 256:.0f} (it is {limit_mb})"
            )
        resource.setrlimit(resource.RLIMIT_AS, (limit_mb * 2**20, limit_mb * 2**20))
        return None


class NondeterministicEnvironment(RuntimeError):
    """An environment that gave two observations for the same prompt and actions."""


def observation_digest(found: Observation) -> int:
    """A digest of the whole observation."""
    return zlib.crc32(msgspec.json.encode(found))


def _check_same_observation(before: int, again: Observation, method: str) -> None:
    if observation_digest(again) != before:
        raise NondeterministicEnvironment(
            f"{method} returned another observation than before for the same prompt and actions. Environments must be "
            "deterministic: calls are repeated if a process is lost, and where conversations branch. Derive random "
            "numbers from the prompt."
        )


async def _awaited(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


async def _finished(value: Any, seconds: float) -> None:
    async with asyncio.timeout(seconds):
        await _awaited(value)


def _no_result() -> Any:
    raise RuntimeError("prepare() was not called")
