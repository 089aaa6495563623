"""Publishes weights from the trainer to the engines: versioned, fenced, idempotent; from device to device where
possible, through host memory otherwise.
"""

import itertools
import logging
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from lockstep.base.bounded_wait import Stalled
from lockstep.cluster.protocol import Cluster, PendingResult, RemoteError, Worker, WorkerDied
from lockstep.cluster.rpc.futures import gather_outcomes, gather_results
from lockstep.ledger.ledger import Ledger
from lockstep.rollout.client.rollout_client import RolloutClient
from lockstep.rollout.engine_protocol import EngineAPI
from lockstep.run.planning.prepare import PreparedRun
from lockstep.run.planning.run_plan import engine_dtype, weight_devices
from lockstep.run.policy_api import PolicyAPI
from lockstep.run.trainer_group import TrainerGroup
from lockstep.run.worker_launcher import WorkerLauncher
from lockstep.weights.errors import BufferHeld
from lockstep.weights.relay.relay_transport import RelayTransport
from lockstep.weights.shared_memory import SharedMemoryTransport
from lockstep.weights.store_files import FENCE_TIMEOUT_S
from lockstep.weights.stream.channel import StreamChannel, StreamTransport
from lockstep.weights.weight_plan import WeightPlan
from lockstep.weights.weight_transport import (
    WeightTransport,
    WriteVersion,
    select_device_transport,
    select_host_transport,
)
from lockstep.weights.write_records import ChecksumMode

log = logging.getLogger(__name__)

MAX_SEND_ATTEMPTS = 2
"""How often a version is sent at most: to all, and once more to those that did not get it because of others."""
MAX_MISSED_VERSIONS = 2
"""Versions in a row that an engine may miss before it gets all of them through host memory."""
ANSWER_LIMIT_S = 5.0
"""A receiver whose own bounds are over answers within this time, or is left to the way through host memory."""
_RETRYABLE_ERRORS = frozenset({"weight_link_failed", "torn_weights", "interrupted_update"})
"""Codes of errors of receivers that may be another's fault."""
_MISMATCH_ERRORS = frozenset({"plan_mismatch", "weights_mismatch"})
"""Codes of errors that no way of sending would mend."""


class TrainerRanks(Protocol):
    """Of a `TrainerGroup`, what is needed here."""

    workers: list[Worker]


@dataclass(frozen=True, slots=True)
class ChannelSettings:
    """What all channels of a run have in common; see `StreamChannel`."""

    way: StreamTransport
    store: tuple[str, int]
    scope: str
    backend: str = "nccl"
    width: int = 1
    bucket_bytes: int = 64 << 20
    check: ChecksumMode = "sampled"
    limit_s: float = 60.0


@dataclass(slots=True)
class SendResult:
    """How it ended for every engine."""

    taken: list[Worker] = field(default_factory=list)
    again: list[Worker] = field(default_factory=list)
    """Those that did not get it, and may not be why."""


class DeviceWeightSync:
    """Sends versions to all engines at once, over one channel that lasts as long as its members do. Who fails is left
    out of the next one: it gets the version through host memory, where every version is as well.

    Args:
        ranks: the trainer's; its ranks at the time of a call.
        plan: of the weights.
    """

    def __init__(self, ranks: TrainerRanks, plan: WeightPlan, terms: ChannelSettings) -> None:
        self._ranks, self._plan, self._terms = ranks, plan.to_json(), terms
        self._numbers = itertools.count(1)
        self._channel: StreamChannel | None = None
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
        members = [engine for engine in engines if self._strikes.get(engine.spec.name, 0) < MAX_MISSED_VERSIONS]
        taken: list[Worker] = []
        missing = members
        for _ in range(MAX_SEND_ATTEMPTS):
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
            always = " and all after it" if strikes == MAX_MISSED_VERSIONS else ""
            log.warning("%s: version %d%s comes through host memory", name, version, always)

    def _send(self, version: int, engines: Sequence[Worker]) -> SendResult:
        channel, self._channel, began = self._channel_to(engines), None, time.monotonic()
        names = [engine.spec.name for engine in engines]
        asked = [
            engine.submit(EngineAPI.receive_weights, channel.where(name, self._plan), version)
            for engine, name in zip(engines, names, strict=True)
        ]
        sending = [rank.submit(PolicyAPI.stream_weights, channel, version) for rank in self._ranks.workers]
        problems = [problem for problem in gather_results(sending, why=f"send version {version}") if problem]
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
        self, channel: StreamChannel, version: int, engines: Sequence[Worker], asked: Sequence[PendingResult[None]]
    ) -> SendResult:
        """What a receiver says counts: it has checked every bucket, or it has not got the version."""
        found = SendResult()
        outcomes = gather_outcomes(asked, f"weights of version {version}", channel.limit_s + ANSWER_LIMIT_S)
        for engine, outcome in zip(engines, outcomes, strict=True):
            if outcome is None:
                found.taken.append(engine)
                continue
            log.warning("%s has not got version %d: %s", engine.spec.name, version, outcome)
            code = outcome.code if isinstance(outcome, RemoteError) else ""
            if code in _MISMATCH_ERRORS and isinstance(outcome, RemoteError):
                raise outcome
            if code in _RETRYABLE_ERRORS:
                found.again.append(engine)
            assert isinstance(outcome, RemoteError | WorkerDied | Stalled)
        return found

    def _channel_to(self, engines: Sequence[Worker]) -> StreamChannel:
        """The open one, where it is of these processes."""
        names = tuple(worker.spec.name for worker in engines)
        members = (*(worker.spec.name for worker in self._ranks.workers), *names)
        if self._channel is None or self._members != members:
            terms = self._terms
            self._members = members
            self._channel = StreamChannel(
                next(self._numbers), terms.way, terms.backend, terms.store, terms.scope, names, terms.width,
                terms.bucket_bytes, terms.check, terms.limit_s,
            )  # fmt: skip
        return self._channel


class WeightPublisher:
    """Publishes versions. Trainer ranks write their rows into the inactive buffer of their node's store; the version is
    committed (only then can it be read) and brought to the engines' nodes; the engines take it."""

    def __init__(
        self,
        policy: TrainerGroup,
        engines: RolloutClient,
        delivery: WeightTransport,
        ledger: Ledger,
        devices: DeviceWeightSync | None = None,
    ) -> None:
        self.policy, self.engines, self.delivery, self.ledger = policy, engines, delivery, ledger
        self.devices = devices
        """Where weights go from GPU to GPU, what sends them; what the ranks write is for those who miss it then."""
        self.published: int | None = None

    def open_on_ranks(self) -> None:
        """Lets the policy's ranks write into stores, into others where those were made for more of them."""
        workers = self.policy.workers
        folders = self.delivery.lay_out(workers)
        opened = [worker.submit(PolicyAPI.open_weights, where) for worker, where in zip(workers, folders, strict=True)]
        gather_results(opened, why="open weights")

    def publish(self, version: int) -> None:
        """Makes `version_numbers` what the engines serve; does nothing where they do already, or serve a later one:
        steps that are trained again after a fault make the versions again that there were."""
        if self.published is not None and version <= self.published:
            return
        having: list[Worker] = []

        def write() -> list[Worker]:
            self.policy.write_weights(version)
            self.policy.offload()  # engines on the same devices wake for their weights
            engines = self.engines.workers
            having[:] = [] if self.devices is None else self.devices.publish(version, engines)
            return [engine for engine in engines if engine not in having]

        self._deliver(version, write)
        self.engines.load_weights(self.delivery, version, having)
        self.ledger.published(version)
        self.published = version
        self.delivery.served()

    def _deliver(self, version: int, write: WriteVersion) -> None:
        """Has the version written and brought to the engines' nodes; whoever is in the way of that is ended."""
        for hanging in self.delivery.hanging():
            self.engines.end(partial(self.delivery.reads, held=hanging), str(hanging))
        began, before = time.monotonic(), self.engines.moves_of(lambda _: True)
        while True:
            try:
                self.delivery.publish(version, write)
                return
            except BufferHeld as held:
                reads = partial(self.delivery.reads, held=held)
                now = self.engines.moves_of(reads)
                if any(before.get(name) != moves for name, moves in now.items()):
                    before |= now  # a large copy that gets on: it lets go by itself
                elif not self.engines.end(reads, str(held)) and time.monotonic() - began > FENCE_TIMEOUT_S:
                    raise  # it is no engine of this run, nor one that was ended and is going


def make_weight_plan(prepared: PreparedRun, policy: TrainerGroup) -> WeightPlan:
    """What all sides agree on before bytes move."""
    dtype = engine_dtype(prepared.config, prepared.model)
    return WeightPlan.of([(each.name, each.shape, dtype) for each in policy.info.parameters])


def make_device_sync(
    prepared: PreparedRun, policy: TrainerGroup, engines: Sequence[Worker], cluster: Cluster, staff: WorkerLauncher
) -> DeviceWeightSync | None:
    """What sends weights from GPU to GPU; None where they go through host memory only.

    Raises:
        ValueError: `weights.transport` cannot serve this placement.
    """
    config = prepared.config
    choice = select_device_transport(
        config.weights.transport,
        weight_devices(config, prepared.plan.processes, policy.info.slower),
        {cluster.node_of(worker).name for worker in policy.workers},
        {cluster.node_of(worker).name for worker in engines},
    )
    if choice.way is None:
        log.debug("weights do not go from device to device: %s", choice.reason)
        return None
    log.info("weights go by %s: %s", choice.way, choice.reason)
    engine, weights = config.rollout.engine, config.weights
    terms = ChannelSettings(
        choice.way, cluster.store(), f"gen{staff.generation}",
        width=engine.tensor_parallel_size if engine.kind == "vllm" else 1,
        bucket_bytes=int(weights.bucket_mb * 2**20), check=weights.check, limit_s=weights.receiver_limit_s,
    )  # fmt: skip
    return DeviceWeightSync(policy, make_weight_plan(prepared, policy), terms)


def make_weight_delivery(
    prepared: PreparedRun, policy: TrainerGroup, engines: Sequence[Worker], cluster: Cluster, staff: WorkerLauncher
) -> WeightTransport:
    """What brings weights to where the engines are, through host memory.

    Raises:
        ValueError: `weights.transport` cannot serve this placement.
    """
    config, nodes = prepared.config, cluster.nodes()
    plan = make_weight_plan(prepared, policy)
    choice = select_host_transport(
        config.weights.transport,
        {cluster.node_of(worker).name for worker in policy.workers},
        {cluster.node_of(worker).name for worker in engines},
        nodes[0].name,
        len(nodes),
    )
    log.info("weights go through host memory by %s: %s", choice.transport, choice.reason)
    if choice.transport == "shared":
        folder = nodes[0].shared / "weights"
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        return SharedMemoryTransport(folder, plan, staff.generation, config.weights.receiver_limit_s)
    staff.way = choice.transport
    return RelayTransport(cluster, staff, plan, config.weights.receiver_limit_s)
