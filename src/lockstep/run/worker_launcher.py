"""Starts the workers of a run as planned, and their replacements after a failure."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lockstep.cluster.protocol import Cluster, NodeInfo, Worker, WorkerSpec, successor_name
from lockstep.config.serve_role import ServeRole
from lockstep.config.train_role import TrainRole
from lockstep.rollout.engine_protocol import ENGINE_SERVICE
from lockstep.run.planning.prepare import PreparedRun
from lockstep.run.planning.run_plan import PlannedProcess
from lockstep.run.planning.worker_preload import PRELOAD_MODULES, WORKER_ENVIRONMENT
from lockstep.run.run_id import read_run_id
from lockstep.weights.relay.relay_api import RELAY_SERVICE

POLICY_SERVICE = "lockstep.run.policy_service:PolicyService"
ROLE_SERVICE = "lockstep.run.policy_service:RoleService"
SERVED_MODEL_SERVICE = "lockstep.train.served_model_service:ServedModelService"
WEIGHT_READERS = {
    "sampled": "lockstep.weights.shared_memory_transport:StoreReader",
    "complete": "lockstep.weights.shared_memory_transport:complete_store_reader",
}
"""The reader of published weights in engines, by `weights.check`."""

PLACEMENT_LIMIT_S = 60.0
"""How long a rank that lost its node waits for another node, if the trainer may continue without the rank."""


class RunWorkerLauncher:
    """Implements `WorkerLauncher` for the ranks of trained roles (such as policy) and served ones (such as reference),
    engines (role rollout) and weight relays (role weights). Scorers and environments are started by their pools."""

    def __init__(self, prepared: PreparedRun, cluster: Cluster, generation: int) -> None:
        self.prepared, self.cluster, self.generation = prepared, cluster, generation
        self._latest: dict[tuple[str, int], str] = {}
        """The name of the latest process, by role and rank."""
        self._roles = {role.name: role for role in prepared.config.train_roles}
        self._served = {role.name: role for role in prepared.config.serve_roles}
        self._starts: Counter[str] = Counter()
        """How often the ranks of each trained or served role were started."""
        self.relay_transport = "gloo"
        """The transport between relays."""
        self._relay_ranks: dict[str, int] = {}
        """Ranks of the relays, by node."""

    def launch_all(self) -> tuple[list[Worker], list[Worker], list[Worker]]:
        """Starts trainer ranks, ranks of served models, and engines in parallel, and returns them. Engines load their
        models as they start; ranks use no device before they are set up."""
        specs = [spec for role in self._roles.values() for spec in self._trainer_specs(role, role.trainer.ranks)]
        specs += [spec for role in self._served.values() for spec in self._served_specs(role)]
        specs += [self._engine_spec(process) for process in self._planned("rollout")]
        workers = self._start(specs)
        trained = [worker for worker in workers if worker.spec.role in self._roles]
        served = [worker for worker in workers if worker.spec.role in self._served]
        return trained, served, [worker for worker in workers if worker.spec.role == "rollout"]

    def place(self, role: str, ranks: Sequence[int]) -> None:
        """See `WorkerLauncher`; for engines, which may have to wait for their turn between this and `launch`."""
        planned = self._planned(role)
        for process in (planned[rank] for rank in ranks):
            self.cluster.place(WorkerSpec(process.name, role, process.rank, ENGINE_SERVICE))

    def launch(self, role: str, ranks: Sequence[int] = (), node: NodeInfo | None = None) -> list[Worker]:
        """See `WorkerLauncher`. The ranks of a model always start together, so their `ranks` begin at 0."""
        if node is not None:
            return self._start([self._relay_spec(node)])
        if role in self._roles:
            return self._start(self._trainer_specs(self._roles[role], len(ranks)))
        if role in self._served:
            return self._start(self._served_specs(self._served[role]))
        planned = self._planned(role)
        return self._start([self._engine_spec(planned[rank]) for rank in ranks])

    def kill(self, workers: Sequence[Worker]) -> None:
        """Kills workers at once, whatever they are doing; some may have ended already."""
        for worker in workers:
            self.cluster.stop(worker, grace_s=0.0)

    def _start(self, specs: Sequence[WorkerSpec]) -> list[Worker]:
        workers = self.cluster.start(specs)
        self._latest |= {(worker.spec.role, worker.spec.rank): worker.spec.name for worker in workers}
        return workers

    def _planned(self, role: str) -> list[PlannedProcess]:
        return [process for process in self.prepared.plan.processes if process.role == role]

    def _trainer_specs(self, role: TrainRole, count: int) -> list[WorkerSpec]:
        start = self._count_start(role.name)
        return [self._trainer_spec(role, process, start, count) for process in self._planned(role.name)[:count]]

    def _count_start(self, role: str) -> int:
        """The number of earlier starts of a role's ranks."""
        self._starts[role] += 1
        return self._starts[role] - 1

    def _rank_arguments(self, process: PlannedProcess, start: int, world: int) -> dict[str, Any]:
        """The arguments of every rank of a model, besides its role."""
        return {
            **self._images(),
            "rank": process.rank,
            "world": world,
            "store": self.cluster.store() if world > 1 else None,
            "device": process.device,
            "generation": self.generation,
            "restarts": start,
        }

    def _images(self) -> dict[str, str | None]:
        """The argument of ranks and engines that read images."""
        folder = self.prepared.images
        return {"images": None if folder is None else str(folder)}

    def _served_specs(self, role: ServeRole) -> list[WorkerSpec]:
        start = self._count_start(role.name)
        return [
            self._spec(
                process,
                SERVED_MODEL_SERVICE,
                {
                    "role": role.model_copy(update={"threads": process.threads}).model_dump(mode="json"),
                    **self._rank_arguments(process, start, role.ranks),
                },
            )
            for process in self._planned(role.name)
        ]

    def _trainer_spec(self, role: TrainRole, process: PlannedProcess, start: int, world: int) -> WorkerSpec:
        config = self.prepared.config
        compiles = self.prepared.plan.compile.get(role.name, role.trainer.compile)
        planned = {"threads": process.threads, "ranks": world, "compile": compiles}
        trainer = role.trainer.model_copy(update=planned)
        folder = self.prepared.folder.absolute()  # workers on other nodes have another working folder
        arguments = {
            "role": role.model_copy(update={"trainer": trainer}).model_dump(mode="json"),
            "run_folder": str(folder),
            "run_id": read_run_id(folder),
            **self._rank_arguments(process, start, world),
        }
        if role.name == next(iter(self._roles)):  # the policy
            spec = self._spec(process, POLICY_SERVICE, {**arguments, "check": config.weights.check})
        else:
            spec = self._spec(process, ROLE_SERVICE, arguments)
        if config.recovery.fewer_ranks:
            spec.placement_limit_s = PLACEMENT_LIMIT_S if world == role.trainer.ranks else PLACEMENT_LIMIT_S / 4
        return spec

    def _engine_spec(self, process: PlannedProcess) -> WorkerSpec:
        config = self.prepared.config
        arguments = {
            "model": config.model.model_dump(mode="json"),
            "engine": config.rollout.engine.model_dump(mode="json", exclude={"count"}),
            "device": process.device,
            "threads": process.threads,
            "reader": WEIGHT_READERS[config.weights.check],
            "sleeps": config.placement.shared,
            **self._images(),
            "most_images": self.prepared.data.most_images if self.prepared.images else 0,
        }
        return self._spec(process, ENGINE_SERVICE, arguments, adoptable=True)

    def _relay_spec(self, node: NodeInfo) -> WorkerSpec:
        weights = self.prepared.config.weights
        folder = self.prepared.folder.absolute()
        arguments = {
            "node": node.name,
            "address": node.address,
            "generation": self.generation,
            "way": self.relay_transport,
            "store": self.cluster.store(),
            "bucket_bytes": int(weights.bucket_mb * 2**20),
            "check": weights.check,
            "delta": weights.delta,
            "limit_s": weights.receiver_limit_s,
            "folder": str(Path(weights.folder) / read_run_id(folder) if weights.folder else folder / "weights"),
        }
        rank = self._relay_ranks.setdefault(node.name, len(self._relay_ranks))
        process = PlannedProcess(f"courier-{rank}", "weights", rank, "cpu", 1, 0)
        spec = self._spec(process, RELAY_SERVICE, arguments)
        spec.node = node.name
        return spec

    def _spec(
        self, process: PlannedProcess, service: str, arguments: dict[str, Any], adoptable: bool = False
    ) -> WorkerSpec:
        slot = process.role, process.rank
        name = self._latest[slot] = successor_name(self._latest[slot]) if slot in self._latest else process.name
        # A forked process cannot use CUDA that its parent has initialised, so workers with a GPU are not forked.
        preload = PRELOAD_MODULES[self.prepared.config.rollout.engine.kind] if process.device == "cpu" else ()
        return WorkerSpec(
            name, process.role, process.rank, service, arguments, dict(WORKER_ENVIRONMENT), preload, adoptable
        )
