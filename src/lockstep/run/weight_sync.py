"""Publishes weights from the trainer to the engines: from GPU to GPU if possible, otherwise through host memory.

Publishing is versioned, fenced and idempotent.
"""

import itertools
import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from lockstep.base.wait_state import Stalled
from lockstep.cluster.protocol import Cluster, PendingResult, RemoteError, Worker, WorkerDied
from lockstep.cluster.rpc.futures import gather_outcomes, gather_results
from lockstep.cluster.rpc.group_calls import submit_all
from lockstep.ledger.ledger import Ledger
from lockstep.rollout.client.rollout_client import RolloutClient
from lockstep.rollout.engine_protocol import EngineAPI
from lockstep.run.planning.prepare import PreparedRun
from lockstep.run.planning.run_plan import engine_dtype, weight_devices
from lockstep.run.policy_api import PolicyAPI
from lockstep.run.trainer_group import TrainerGroup
from lockstep.run.worker_launcher import RunWorkerLauncher
from lockstep.weights.errors import BufferHeld
from lockstep.weights.relay.relay_transport import RelayTransport
from lockstep.weights.shared_memory_transport import SharedMemoryTransport
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
"""How often a version is sent: first to all engines, then to those that may have missed it because of others."""
MAX_MISSED_VERSIONS = 2
"""Versions in a row that an engine may miss before it gets all of them through host memory."""
ANSWER_LIMIT_S = 5.0
"""Added to a receiver's own limit. An engine that has not replied by then gets the version through host memory."""
_RETRYABLE_ERRORS = frozenset({"weight_link_failed", "torn_weights", "interrupted_update"})
"""Error codes of receivers whose cause may be another process."""
_MISMATCH_ERRORS = frozenset({"plan_mismatch", "weights_mismatch"})
"""Error codes that every transport would give."""


class TrainerRanks(Protocol):
    """The part of `TrainerGroup` that is needed here."""

    workers: list[Worker]


@dataclass(frozen=True, slots=True)
class ChannelSettings:
    """The common settings of all channels of a run; see `StreamChannel`."""

    way: StreamTransport
    store: str
    scope: str
    backend: str = "nccl"
    width: int = 1
    bucket_bytes: int = 64 << 20
    check: ChecksumMode = "sampled"
    limit_s: float = 60.0


@dataclass(slots=True)
class SendResult:
    """Which engines got a version."""

    received: list[Worker] = field(default_factory=list)
    retryable: list[Worker] = field(default_factory=list)
    """Engines that did not get the version, perhaps because of other processes."""


class DeviceWeightSync:
    """Sends versions to all engines at once, over one channel that stays open as long as its members stay the same. An
    engine that fails gets the version through host memory, to which every version is written as well.

    Args:
        ranks: the trainer, with its current ranks.
    """

    def __init__(self, ranks: TrainerRanks, plan: WeightPlan, settings: ChannelSettings) -> None:
        self._ranks, self._plan, self._settings = ranks, plan.to_json(), settings
        self._channel_numbers = itertools.count(1)
        self._channel: StreamChannel | None = None
        """The channel of the last version, if all engines got that version."""
        self._members: tuple[str, ...] = ()
        """Trainer ranks and engines of the channel."""
        self._missed: dict[str, int] = {}
        """The number of versions in a row that each engine did not get over the channel."""

    def publish(self, version: int, engines: Sequence[Worker]) -> list[Worker]:
        """Sends a version and returns the engines that have it now.

        Failures delay it by at most about four times a receiver's limit.

        Raises:
            RemoteError: PlanMismatch or WeightsMismatch of an engine, or any error of a trainer rank.
            WorkerDied, Stalled: a trainer rank died or stalled.
        """
        members = [engine for engine in engines if self._missed.get(engine.spec.name, 0) < MAX_MISSED_VERSIONS]
        received: list[Worker] = []
        missing = members
        for _ in range(MAX_SEND_ATTEMPTS):
            if not missing:
                break
            result = self._send(version, missing)
            received += result.received
            missing = result.retryable
        self._count_missed(version, members, {engine.spec.name for engine in received})
        return received

    def _count_missed(self, version: int, members: Sequence[Worker], received: Collection[str]) -> None:
        """Excludes engines that fail repeatedly, since each failure delays all engines by a receiver's limit."""
        for name in (engine.spec.name for engine in members):
            if name in received:
                self._missed.pop(name, None)
                continue
            missed = self._missed[name] = self._missed.get(name, 0) + 1
            later = " and all later ones" if missed == MAX_MISSED_VERSIONS else ""
            log.warning("%s: version %d%s comes through host memory", name, version, later)

    def _send(self, version: int, engines: Sequence[Worker]) -> SendResult:
        channel, self._channel, began = self._channel_to(engines), None, time.monotonic()
        names = [engine.spec.name for engine in engines]
        places = ((channel.where(name, self._plan), version) for name in names)
        receiving = submit_all(engines, EngineAPI.receive_weights, places)
        ranks = self._ranks.workers
        sending = submit_all(ranks, PolicyAPI.stream_weights, [(channel, version)] * len(ranks))
        problems = [problem for problem in gather_results(sending, why=f"send version {version}") if problem]
        for problem in problems:
            log.warning("%s, version %d: %s", channel.name, version, problem)
        result = self._receive_results(channel, version, engines, receiving)
        log.info(
            "version %d: %d of %d engines have it over %s, %.2f s",
            version,
            len(result.received),
            len(engines),
            channel.name,
            time.monotonic() - began,
        )
        if result.received == list(engines) and not problems:
            self._channel = channel  # intact, so it serves the next version too
        return result

    def _receive_results(
        self, channel: StreamChannel, version: int, engines: Sequence[Worker], receiving: Sequence[PendingResult[None]]
    ) -> SendResult:
        """Collects the receivers' results. A receiver that succeeds has checked every bucket."""
        result = SendResult()
        outcomes = gather_outcomes(receiving, f"weights of version {version}", channel.limit_s + ANSWER_LIMIT_S)
        for engine, outcome in zip(engines, outcomes, strict=True):
            if outcome is None:
                result.received.append(engine)
                continue
            log.warning("%s did not receive version %d: %s", engine.spec.name, version, outcome)
            code = outcome.code if isinstance(outcome, RemoteError) else ""
            if code in _MISMATCH_ERRORS and isinstance(outcome, RemoteError):
                raise outcome
            if code in _RETRYABLE_ERRORS:
                result.retryable.append(engine)
            assert isinstance(outcome, RemoteError | WorkerDied | Stalled)
        return result

    def _channel_to(self, engines: Sequence[Worker]) -> StreamChannel:
        """Returns the open channel if it has these members, else opens a new one."""
        names = tuple(worker.spec.name for worker in engines)
        members = (*(worker.spec.name for worker in self._ranks.workers), *names)
        if self._channel is None or self._members != members:
            settings = self._settings
            self._members = members
            self._channel = StreamChannel(
                next(self._channel_numbers), settings.way, settings.backend, settings.store, settings.scope, names,
                settings.width, settings.bucket_bytes, settings.check, settings.limit_s,
            )  # fmt: skip
        return self._channel


class WeightPublisher:
    """Publishes versions. Trainer ranks write their rows into the inactive buffer of their node's store. The version is
    then committed, so that it can be read, and transferred to the engines' nodes, and the engines load it.

    Args:
        delivery: transfers versions through host memory.
        devices: sends weights from GPU to GPU, if the placement allows. What the ranks write is then read only by
            engines that missed a version.
        offload: frees the devices that engines share with trained roles; the policy's by default.
    """

    def __init__(
        self,
        policy: TrainerGroup,
        engines: RolloutClient,
        delivery: WeightTransport,
        ledger: Ledger,
        devices: DeviceWeightSync | None = None,
        offload: Callable[[], None] | None = None,
    ) -> None:
        self.policy, self.engines, self.delivery, self.ledger, self.devices = policy, engines, delivery, ledger, devices
        self._offload = policy.offload if offload is None else offload
        self.published: int | None = None

    def open_on_ranks(self) -> None:
        """Makes the policy's ranks open the stores they write to: new stores if the number of ranks has changed."""
        workers = self.policy.workers
        folders = self.delivery.prepare_stores(workers)
        opened = submit_all(workers, PolicyAPI.open_weights, ((where,) for where in folders))
        gather_results(opened, why="open weights")

    def publish(self, version: int) -> None:
        """Makes the engines serve a version. Does nothing if they already serve this version or a later one: a step
        that is trained again after a fault produces the same version again."""
        if self.published is not None and version <= self.published:
            return
        received: list[Worker] = []

        def write() -> list[Worker]:
            self.policy.write_weights(version)
            self._offload()  # engines on the same devices wake to load the weights
            engines = self.engines.workers
            received[:] = [] if self.devices is None else self.devices.publish(version, engines)
            return [engine for engine in engines if engine not in received]

        self._transfer(version, write)
        self.engines.load_weights(self.delivery, version, received)
        self.ledger.record_published(version)
        self.published = version
        self.delivery.delete_former_stores()

    def _transfer(self, version: int, write: WriteVersion) -> None:
        """Makes the ranks write the version and transfers it to the engines' nodes. Kills engines that block it."""
        for held in self.delivery.blocking_readers():
            self.engines.kill_engines(partial(self.delivery.holds_buffer, held=held), str(held))
        began, before = time.monotonic(), self.engines.progress_by_engine(lambda _: True)
        while True:
            try:
                self.delivery.publish(version, write)
                return
            except BufferHeld as held:
                holds = partial(self.delivery.holds_buffer, held=held)
                now = self.engines.progress_by_engine(holds)
                if any(before.get(name) != moves for name, moves in now.items()):
                    before |= now  # a large copy makes progress: it will release the buffer
                elif not self.engines.kill_engines(holds, str(held)) and time.monotonic() - began > FENCE_TIMEOUT_S:
                    raise  # no engine of this run holds the buffer, and none that is being killed


def make_weight_plan(prepared: PreparedRun, policy: TrainerGroup) -> WeightPlan:
    """The plan of the weights, which all processes agree on before any bytes are sent."""
    dtype = engine_dtype(prepared.config, prepared.model)
    return WeightPlan.of([(each.name, each.shape, dtype) for each in policy.info.parameters])


def make_device_sync(
    prepared: PreparedRun,
    policy: TrainerGroup,
    engines: Sequence[Worker],
    cluster: Cluster,
    launcher: RunWorkerLauncher,
) -> DeviceWeightSync | None:
    """The direct transport from GPU to GPU; None if weights go through host memory only.

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
        log.debug("no direct transport from device to device: %s", choice.reason)
        return None
    log.info("weights are sent by %s: %s", choice.way, choice.reason)
    engine, weights = config.rollout.engine, config.weights
    settings = ChannelSettings(
        choice.way, cluster.store(), f"gen{launcher.generation}",
        width=engine.tensor_parallel_size if engine.kind == "vllm" else 1,
        bucket_bytes=int(weights.bucket_mb * 2**20), check=weights.check, limit_s=weights.receiver_limit_s,
    )  # fmt: skip
    return DeviceWeightSync(policy, make_weight_plan(prepared, policy), settings)


def make_weight_delivery(
    prepared: PreparedRun,
    policy: TrainerGroup,
    engines: Sequence[Worker],
    cluster: Cluster,
    launcher: RunWorkerLauncher,
) -> WeightTransport:
    """The transport of weights to the engines' nodes through host memory.

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
    log.info("weights are sent through host memory by %s: %s", choice.transport, choice.reason)
    if choice.transport == "shared":
        folder = nodes[0].shared / "weights"
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        return SharedMemoryTransport(folder, plan, launcher.generation, config.weights.receiver_limit_s)
    launcher.relay_transport = choice.transport
    return RelayTransport(cluster, launcher, plan, config.weights.receiver_limit_s)
