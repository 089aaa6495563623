"""Weights from the trainer's devices into the engines': the controller's side of `lockstep.weights.stream`."""

import itertools
import logging
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from lockstep.cluster.calls import gather, settle
from lockstep.cluster.protocol import Pending, RemoteError, Worker, WorkerDied
from lockstep.run.services import EngineAPI, PolicyAPI
from lockstep.watch.waits import Stalled
from lockstep.weights.buckets import Check
from lockstep.weights.plan import Plan
from lockstep.weights.stream.channel import Channel, Way

log = logging.getLogger(__name__)

ROUNDS = 2
"""How often a version is sent at most: to all, and once more to those that did not get it because of others."""
STRIKES = 2
"""Versions in a row that an engine may miss before it gets all of them through host memory."""
ANSWER_S = 5.0
"""A receiver whose own bounds are over answers within this time, or is left to the way through host memory."""
_INNOCENT = frozenset({"weight_link_failed", "torn_weights", "interrupted_update"})
"""Codes of errors of receivers that may be another's fault."""
_MISMATCH = frozenset({"plan_mismatch", "weights_mismatch"})
"""Codes of errors that no way of sending would mend."""


class Ranks(Protocol):
    """Of a `Policy`, what is needed here."""

    workers: list[Worker]


@dataclass(frozen=True, slots=True)
class Terms:
    """What all channels of a run have in common; see `Channel`."""

    way: Way
    store: tuple[str, int]
    scope: str
    backend: str = "nccl"
    width: int = 1
    bucket_bytes: int = 64 << 20
    check: Check = "sampled"
    limit_s: float = 60.0


@dataclass(slots=True)
class Round:
    """How it ended for every engine."""

    taken: list[Worker] = field(default_factory=list)
    again: list[Worker] = field(default_factory=list)
    """Those that did not get it, and may not be why."""


class DeviceSync:
    """Sends versions to all engines at once, over one channel that lasts as long as its members do. Who fails is left
    out of the next one: it gets the version through host memory, where every version is as well.

    Args:
        ranks: the trainer's; its ranks at the time of a call.
        plan: of the weights.
    """

    def __init__(self, ranks: Ranks, plan: Plan, terms: Terms) -> None:
        self._ranks, self._plan, self._terms = ranks, plan.to_json(), terms
        self._numbers = itertools.count(1)
        self._channel: Channel | None = None
        """Of the last version, where all got that."""
        self._members: tuple[str, ...] = ()
        """Trainer ranks and engines of the channel."""
        self._strikes: dict[str, int] = {}
        """By engine: how many versions in a row it did not get this way."""

    def publish(self, version: int, engines: Sequence[Worker]) -> list[Worker]:
        """Those of the engines that have the version now. It takes at most about four limits of a receiver more than
        the bytes.

        Raises:
            RemoteError: PlanMismatch or WeightsMismatch of an engine, or what a trainer rank raised.
            WorkerDied, Stalled: a trainer rank's.
        """
        members = [engine for engine in engines if self._strikes.get(engine.spec.name, 0) < STRIKES]
        taken: list[Worker] = []
        missing = members
        for _ in range(ROUNDS):
            if not missing:
                break
            found = self._send(version, missing)
            taken += found.taken
            missing = found.again
        self._count(version, members, {engine.spec.name for engine in taken})
        return taken

    def _count(self, version: int, members: Sequence[Worker], taken: Collection[str]) -> None:
        """Who fails again and again costs everybody its limit: it is not asked any more."""
        for name in (engine.spec.name for engine in members):
            if name in taken:
                self._strikes.pop(name, None)
                continue
            strikes = self._strikes[name] = self._strikes.get(name, 0) + 1
            always = " and all after it" if strikes == STRIKES else ""
            log.warning("%s: version %d%s comes through host memory", name, version, always)

    def _send(self, version: int, engines: Sequence[Worker]) -> Round:
        channel, self._channel, began = self._channel_to(engines), None, time.monotonic()
        names = [engine.spec.name for engine in engines]
        asked = [
            engine.submit(EngineAPI.receive_weights, channel.where(name, self._plan), version)
            for engine, name in zip(engines, names, strict=True)
        ]
        sending = [rank.submit(PolicyAPI.stream_weights, channel, version) for rank in self._ranks.workers]
        problems = [problem for problem in gather(sending, why=f"send version {version}") if problem]
        for problem in problems:
            log.warning("%s, version %d: %s", channel.name, version, problem)
        found = self._judge(channel, version, engines, asked)
        log.info(
            "version %d: %d of %d engines have it over %s, %.2f s",
            version,
            len(found.taken),
            len(engines),
            channel.name,
            time.monotonic() - began,
        )
        if found.taken == list(engines) and not problems:
            self._channel = channel  # whole, so it serves the next version too
        return found

    def _judge(
        self, channel: Channel, version: int, engines: Sequence[Worker], asked: Sequence[Pending[None]]
    ) -> Round:
        """What a receiver says counts: it has checked every bucket, or it has not got the version."""
        found = Round()
        outcomes = settle(asked, f"weights of version {version}", channel.limit_s + ANSWER_S)
        for engine, outcome in zip(engines, outcomes, strict=True):
            if outcome is None:
                found.taken.append(engine)
                continue
            log.warning("%s has not got version %d: %s", engine.spec.name, version, outcome)
            code = outcome.code if isinstance(outcome, RemoteError) else ""
            if code in _MISMATCH and isinstance(outcome, RemoteError):
                raise outcome
            if code in _INNOCENT:
                found.again.append(engine)
            assert isinstance(outcome, RemoteError | WorkerDied | Stalled)
        return found

    def _channel_to(self, engines: Sequence[Worker]) -> Channel:
        """The open one, where it is of these processes."""
        names = tuple(worker.spec.name for worker in engines)
        members = (*(worker.spec.name for worker in self._ranks.workers), *names)
        if self._channel is None or self._members != members:
            terms = self._terms
            self._members = members
            self._channel = Channel(
                next(self._numbers), terms.way, terms.backend, terms.store, terms.scope, names, terms.width,
                terms.bucket_bytes, terms.check, terms.limit_s,
            )  # fmt: skip
        return self._channel
