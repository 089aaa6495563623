"""Weights from the trainer to the engines: versioned, fenced, idempotent."""

import logging
import time
from collections.abc import Sequence
from functools import partial

from lockstep.cluster.calls import gather
from lockstep.cluster.protocol import Cluster, Worker
from lockstep.ledger.ledger import Ledger
from lockstep.run.device_sync import DeviceSync, Terms
from lockstep.run.engines import Engines
from lockstep.run.plan import devices_of, engine_dtype
from lockstep.run.policy import Policy
from lockstep.run.prepare import Prepared
from lockstep.run.services import PolicyAPI
from lockstep.run.staff import Staff
from lockstep.weights.choose import choose, choose_direct
from lockstep.weights.couriers import Couriers
from lockstep.weights.delivery import Delivery, Write
from lockstep.weights.errors import BufferHeld
from lockstep.weights.lease import FENCE_TIMEOUT_S
from lockstep.weights.one_host import OneHost
from lockstep.weights.plan import Plan

log = logging.getLogger(__name__)


class WeightSync:
    """Publishes versions. Trainer ranks write their rows into the inactive buffer of their node's store; the version is
    committed (only then can it be read) and brought to the engines' nodes; the engines take it."""

    def __init__(
        self, policy: Policy, engines: Engines, delivery: Delivery, ledger: Ledger, devices: DeviceSync | None = None
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
        gather(opened, why="open weights")

    def publish(self, version: int) -> None:
        """Makes `version` what the engines serve; does nothing where they do already, or serve a later one: steps that
        are trained again after a fault make the versions again that there were."""
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

    def _deliver(self, version: int, write: Write) -> None:
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


def plan_of(prepared: Prepared, policy: Policy) -> Plan:
    """What all sides agree on before bytes move."""
    dtype = engine_dtype(prepared.config, prepared.model)
    return Plan.of([(each.name, each.shape, dtype) for each in policy.info.parameters])


def devices_sync_of(
    prepared: Prepared, policy: Policy, engines: Sequence[Worker], cluster: Cluster, staff: Staff
) -> DeviceSync | None:
    """What sends weights from GPU to GPU; None where they go through host memory only.

    Raises:
        ValueError: `weights.transport` cannot serve this placement.
    """
    config = prepared.config
    choice = choose_direct(
        config.weights.transport,
        devices_of(config, prepared.plan.processes, policy.info.slower),
        {cluster.node_of(worker).name for worker in policy.workers},
        {cluster.node_of(worker).name for worker in engines},
    )
    if choice.way is None:
        log.debug("weights do not go from device to device: %s", choice.reason)
        return None
    log.info("weights go by %s: %s", choice.way, choice.reason)
    engine, weights = config.rollout.engine, config.weights
    terms = Terms(
        choice.way, cluster.store(), f"gen{staff.generation}",
        width=engine.tensor_parallel_size if engine.kind == "vllm" else 1,
        bucket_bytes=int(weights.bucket_mb * 2**20), check=weights.check, limit_s=weights.receiver_limit_s,
    )  # fmt: skip
    return DeviceSync(policy, plan_of(prepared, policy), terms)


def delivery_of(
    prepared: Prepared, policy: Policy, engines: Sequence[Worker], cluster: Cluster, staff: Staff
) -> Delivery:
    """What brings weights to where the engines are, through host memory.

    Raises:
        ValueError: `weights.transport` cannot serve this placement.
    """
    config, nodes = prepared.config, cluster.nodes()
    plan = plan_of(prepared, policy)
    choice = choose(
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
        return OneHost(folder, plan, staff.generation, config.weights.receiver_limit_s)
    staff.way = choice.transport
    return Couriers(cluster, staff, plan, config.weights.receiver_limit_s)
