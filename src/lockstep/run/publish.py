"""Weights from the trainer to the engines: versioned, fenced, idempotent."""

import logging
from collections.abc import Sequence

from lockstep.cluster.calls import gather
from lockstep.cluster.protocol import Cluster, Worker
from lockstep.ledger.ledger import Ledger
from lockstep.run.engines import Engines
from lockstep.run.plan import engine_dtype
from lockstep.run.policy import Policy
from lockstep.run.prepare import Prepared
from lockstep.run.services import PolicyAPI
from lockstep.run.staff import Staff
from lockstep.weights.choose import choose
from lockstep.weights.couriers import Couriers
from lockstep.weights.delivery import Delivery
from lockstep.weights.one_host import OneHost
from lockstep.weights.plan import Plan

log = logging.getLogger(__name__)


class WeightSync:
    """Publishes versions. Trainer ranks write their rows into the inactive buffer of their node's store; the version is
    committed (only then can it be read) and brought to the engines' nodes; the engines take it."""

    def __init__(self, policy: Policy, engines: Engines, delivery: Delivery, ledger: Ledger) -> None:
        self.policy, self.engines, self.delivery, self.ledger = policy, engines, delivery, ledger
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
        self.policy.write_weights(version)
        self.delivery.publish(version, self.engines.workers)
        self.engines.load_weights(self.delivery, version)
        self.ledger.published(version)
        self.published = version
        self.delivery.served()


def delivery_of(
    prepared: Prepared, policy: Policy, engines: Sequence[Worker], cluster: Cluster, staff: Staff
) -> Delivery:
    """What brings weights to where the engines are, with the plan that all sides agree on before bytes move.

    Raises:
        ValueError: `weights.transport` cannot serve this placement.
    """
    config, nodes = prepared.config, cluster.nodes()
    dtype = engine_dtype(config, prepared.model)
    plan = Plan.of([(each.name, each.shape, dtype) for each in policy.info.parameters])
    choice = choose(
        config.weights.transport,
        {cluster.node_of(worker).name for worker in policy.workers},
        {cluster.node_of(worker).name for worker in engines},
        nodes[0].name,
        len(nodes),
    )
    log.info("weights go by %s: %s", choice.transport, choice.reason)
    if choice.transport == "shared":
        folder = nodes[0].shared / "weights"
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        return OneHost(folder, plan, staff.generation)
    staff.way = choice.transport
    return Couriers(cluster, staff, plan, config.weights.receiver_limit_s)
