"""Starts the workers of a run as the plan says, and their successors after a failure."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lockstep.cluster.protocol import Cluster, NodeInfo, Worker, WorkerSpec, successor_name
from lockstep.run.planning.prepare import PreparedRun
from lockstep.run.planning.run_plan import PlannedProcess
from lockstep.run.run_id import read_run_id

POLICY_SERVICE = "lockstep.run.policy_service:PolicyService"
ENGINE_SERVICE = "lockstep.rollout.engine_service:EngineService"
COURIER_SERVICE = "lockstep.weights.relay.weight_relay:WeightRelay"
WEIGHT_READERS = {
    "sampled": "lockstep.weights.shared_memory:StoreReader",
    "complete": "lockstep.weights.shared_memory:complete_store_reader",
}
"""What engines read weights by, by `weights.check`."""
PRELOAD_MODULES = {
    "builtin": ("torch", "transformers", "lockstep.run.policy_service", "lockstep.rollout.engine_service",
                "lockstep.rollout.builtin"),
    "vllm": ("torch", "transformers", "lockstep.run.policy_service", "lockstep.rollout.engine_service"),
}  # fmt: skip
"""By the kind of engines: what the template process imports, for trainer ranks and engines alike. vLLM is left to the
engines: it sets up its platform and threads when it is imported, which trainer ranks must not inherit."""


WORKER_ENVIRONMENT = {"OMP_WAIT_POLICY": "passive", "TOKENIZERS_PARALLELISM": "false"}
"""Of trainer ranks and engines. Idle OpenMP threads sleep instead of spinning, as the roles take turns on the same
cores. How many threads there are is an argument of each service: the environment is one for all, so that one template
process serves them all."""

PLACEMENT_LIMIT_S = 60.0
"""A rank that has lost its node gets another within this, where the trainer may go on without it."""


class WorkerLauncher:
    """Starts trainer ranks and engines; scorers and environments start with their pools."""

    def __init__(self, prepared: PreparedRun, cluster: Cluster, generation: int) -> None:
        self.prepared, self.cluster, self.generation = prepared, cluster, generation
        self._latest: dict[tuple[str, int], str] = {}
        """By role and rank: name of the latest process."""
        self._formed = 0
        """How often the trainer's ranks were started."""
        self.way = "gloo"
        """What couriers send by."""
        self._posts: dict[str, int] = {}
        """Rank of every node's courier."""

    def everybody(self) -> tuple[list[Worker], list[Worker]]:
        """Trainer ranks and engines, started side by side. Engines have their models when they are there; ranks take
        nothing of a device before they are set up."""
        specs = self._ranks(self.prepared.config.trainer.ranks)
        specs += [self._engine(each) for each in self._planned("rollout")]
        workers = self._start(specs)
        return [w for w in workers if w.spec.role == "policy"], [w for w in workers if w.spec.role == "rollout"]

    def ranks(self, count: int) -> list[Worker]:
        """So many trainer ranks, in place of those that were."""
        return self._start(self._ranks(count))

    def engine(self, rank: int) -> Worker:
        """Another engine in the place of that rank."""
        (worker,) = self._start([self._engine(self._planned("rollout")[rank])])
        return worker

    def courier(self, node: NodeInfo) -> Worker:
        """What moves weights to and from a node, also in place of one that was."""
        weights, (host, port) = self.prepared.config.weights, self.cluster.store()
        folder = self.prepared.folder.absolute()
        arguments = {
            "node": node.name,
            "address": node.address,
            "generation": self.generation,
            "way": self.way,
            "store_host": host,
            "store_port": port,
            "bucket_bytes": int(weights.bucket_mb * 2**20),
            "check": weights.check,
            "delta": weights.delta,
            "limit_s": weights.receiver_limit_s,
            "folder": str(Path(weights.folder) / read_run_id(folder) if weights.folder else folder / "weights"),
        }
        rank = self._posts.setdefault(node.name, len(self._posts))
        process = PlannedProcess(f"courier-{rank}", "weights", rank, "cpu", 1, 0)
        spec = self._spec(process, COURIER_SERVICE, arguments)
        spec.node = node.name
        (worker,) = self._start([spec])
        return worker

    def dismiss(self, workers: Sequence[Worker]) -> None:
        """Ends workers at once, whatever they do; they may have ended already."""
        for worker in workers:
            self.cluster.stop(worker, grace_s=0.0)

    def _start(self, specs: Sequence[WorkerSpec]) -> list[Worker]:
        workers = self.cluster.start(specs)
        self._latest |= {(worker.spec.role, worker.spec.rank): worker.spec.name for worker in workers}
        return workers

    def _planned(self, role: str) -> list[PlannedProcess]:
        return [process for process in self.prepared.plan.processes if process.role == role]

    def _ranks(self, count: int) -> list[WorkerSpec]:
        life, self._formed = self._formed, self._formed + 1
        return [self._rank(process, life, count) for process in self._planned("policy")[:count]]

    def _rank(self, process: PlannedProcess, life: int, world: int) -> WorkerSpec:
        config = self.prepared.config
        trainer = config.trainer.model_copy(update={"threads": process.threads, "ranks": world})
        host, port = self.cluster.store()
        folder = self.prepared.folder.absolute()  # workers elsewhere have another working folder
        arguments = {
            "config": config.model_copy(update={"trainer": trainer}).model_dump(mode="json"),
            "rank": process.rank,
            "world": world,
            "store_host": host,
            "store_port": port,
            "run_folder": str(folder),
            "run_id": read_run_id(folder),
            "device": process.device,
            "generation": self.generation,
            "life": life,
        }
        spec = self._spec(process, POLICY_SERVICE, arguments)
        if config.recovery.fewer_ranks:
            spec.place_limit_s = PLACEMENT_LIMIT_S if world == config.trainer.ranks else PLACEMENT_LIMIT_S / 4
        return spec

    def _engine(self, process: PlannedProcess) -> WorkerSpec:
        config = self.prepared.config
        arguments = {
            "model": config.model.model_dump(mode="json"),
            "engine": config.rollout.engine.model_dump(mode="json", exclude={"count"}),
            "device": process.device,
            "threads": process.threads,
            "reader": WEIGHT_READERS[config.weights.check],
            "sleeps": config.placement.shared,
        }
        return self._spec(process, ENGINE_SERVICE, arguments, adoptable=True)

    def _spec(
        self, process: PlannedProcess, service: str, arguments: dict[str, Any], adoptable: bool = False
    ) -> WorkerSpec:
        place = process.role, process.rank
        name = self._latest[place] = successor_name(self._latest[place]) if place in self._latest else process.name
        # A forked process cannot use CUDA that its parent has touched; there, every worker starts from nothing.
        preload = PRELOAD_MODULES[self.prepared.config.rollout.engine.kind] if process.device == "cpu" else ()
        return WorkerSpec(
            name, process.role, process.rank, service, arguments, dict(WORKER_ENVIRONMENT), preload, adoptable
        )
