"""A run as a recipe sees it: its roles, and its steps as transactions."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from lockstep.base.folders import set_access
from lockstep.base.wait_state import Stalled
from lockstep.cluster.protocol import RemoteError, WorkerDied
from lockstep.config.run_config import Export, RunConfig
from lockstep.data.mini_batches import TrainingBatch
from lockstep.data.pair_sources import PairSource
from lockstep.data.sample_sources import SampleSource
from lockstep.data.samples import Document, LabelledCompletion, Pair, Rollouts
from lockstep.ledger.ledger import Ledger
from lockstep.ledger.sqlite_index import CompletionSample
from lockstep.report.step_callbacks import StepCallbacks
from lockstep.rewards.scorer_pool import ScorerPool
from lockstep.rollout.client.rollout_client import RolloutClient
from lockstep.run.checkpoint_manager import CheckpointManager
from lockstep.run.devices.device_turns import EngineTurn
from lockstep.run.errors import Interrupted
from lockstep.run.evaluation.early_stopping import STOP_EVENT, stop_reason
from lockstep.run.evaluation.evaluator import Evaluator
from lockstep.run.group_filter import GroupFilter
from lockstep.run.interrupt import InterruptHandler
from lockstep.run.planning.run_data import RunData
from lockstep.run.recovery.trainer_recovery import RecoveryContext, TrainerRecovery
from lockstep.run.rollout_buffer import RolloutBuffer
from lockstep.run.run_reporter import RunReporter
from lockstep.run.served_roles import ServedGroup, annotate_batches
from lockstep.run.step_metrics import rollout_metrics, update_metrics
from lockstep.run.step_scores import score_statistics
from lockstep.run.trained_roles import TrainedRoles
from lockstep.run.trainer_group import TrainerGroup
from lockstep.run.weight_sync import WeightPublisher

T = TypeVar("T")

GENERATION_STAGES = ("rollout", "evaluate")
"""Stages in which engines use the devices."""


class MissingRole(RuntimeError):
    """A recipe used a role that its config does not have."""

    def __init__(self, role: str) -> None:
        super().__init__(f"this run has no {role}")
        self.role = role


@dataclass(slots=True)
class RunRoles:
    """The roles that were started; None for those that the config does not need."""

    trained: TrainedRoles
    data: RunData
    engines: RolloutClient | None = None
    rewards: ScorerPool | None = None
    weights: WeightPublisher | None = None
    rollouts: RolloutBuffer | None = None
    evaluator: Evaluator | None = None
    served: Sequence[ServedGroup] = ()
    engine_turn: EngineTurn | None = None
    """When engines use the devices that other roles use, too."""

    def before_generation(self) -> None:
        """Makes other roles leave the engines' devices. Also frees those of trained roles that share none and are
        offloaded all the same."""
        self.trained.offload()
        if self.engine_turn is not None:
            self.engine_turn.begin()


class Run:
    """What a recipe works with.

    A step is a transaction: `collected` makes its rollouts durable, `commit` records that it is trained. After a
    restart `steps` begins at the newest complete checkpoint; later steps are trained again from their stored rollouts,
    which `groups` returns.
    """

    def __init__(
        self,
        config: RunConfig,
        folder: Path,
        ledger: Ledger,
        roles: RunRoles,
        reporter: RunReporter,
        interrupt: InterruptHandler,
        start: int,
        context: RecoveryContext,
        callbacks: StepCallbacks | None = None,
    ) -> None:
        self.recovery, self.memory = context.manager, context.memory
        self.config, self.folder, self.ledger, self.roles = config, folder, ledger, roles
        self.reporter, self.interrupt = reporter, interrupt
        self.callbacks = callbacks or StepCallbacks()
        self.trained = roles.trained
        delete_images = partial(roles.data.delete_observations, ledger, config.rollout.max_staleness)
        self.checkpoints = CheckpointManager(
            config.checkpoint, folder / "checkpoints", ledger, roles.trained, roles.trained.parts, delete_images
        )
        self.trainer_recovery = TrainerRecovery(roles.trained, context, self.checkpoints, ledger, roles.weights)
        self._start = self._version = start
        """The number of completed steps at the start, and now."""
        self._boundary_done = -1
        """The version whose evaluation and checkpoint are done."""
        self._last_reported = start - 1
        """The last step whose metrics were reported."""
        self._row: dict[str, float] = {}
        self._reported_row: dict[str, float] = {}
        """The metrics of the last reported step."""
        self._stop_reason = ""
        """Why the run ends before its last step; empty if it does not."""
        self._samples: list[CompletionSample] = []
        """Completions of the step in progress to show when it ends."""

    @property
    def policy(self) -> TrainerGroup:
        return self.trained.policy

    @property
    def critic(self) -> TrainerGroup:
        return _require_role(self.trained.get("critic"), "critic")

    @property
    def engines(self) -> RolloutClient:
        return _require_role(self.roles.engines, "rollout engine")

    @property
    def rewards(self) -> ScorerPool:
        return _require_role(self.roles.rewards, "reward")

    @property
    def weights(self) -> WeightPublisher:
        return _require_role(self.roles.weights, "weight sync")

    @property
    def rollouts(self) -> RolloutBuffer:
        return _require_role(self.roles.rollouts, "rollouts")

    @property
    def samples(self) -> SampleSource[Any]:
        """The data of the recipe, in the order of the run."""
        return self.roles.data.samples

    def documents(self, step: int, count: int) -> list[Document]:
        """Returns the `count` documents of a step."""
        documents: list[Document] = self._take(step, count)
        self._row |= self.samples.counts(documents)
        return documents

    def pairs(self, step: int, count: int) -> list[Pair]:
        """Returns the `count` pairs of a step."""
        pairs: list[Pair] = self._take(step, count)
        self._row |= self.samples.counts(pairs)
        return pairs

    def labelled(self, step: int, count: int) -> list[LabelledCompletion]:
        """Returns the `count` completions with labels of a step."""
        completions: list[LabelledCompletion] = self._take(step, count)
        self._row |= self.samples.counts(completions)
        return completions

    def _take(self, step: int, count: int) -> list[Any]:
        samples = self.roles.data.take(step, step * count, count)
        self._row |= self.roles.data.left_out(step, samples, count)
        return samples

    def seed(self, step: int) -> int:
        """The seed of all random choices in a step except its completions."""
        return self.config.seed * 1_000_003 + step

    def before_steps(self, stage: str, work: Callable[[], bool]) -> None:
        """Calls `work` in a stage, before `steps`, until it returns True. If a trainer rank fails in it, all ranks of
        its role are restarted, and it is called again. Raises GaveUp."""
        done = False
        while not done:
            with self._recovering(), self.stage(stage):
                done = work()

    def steps(self) -> Iterator[int]:
        """Yields the steps to do. After each it evaluates and writes a checkpoint, if they are due.

        Raises:
            Interrupted: after Ctrl-C, once the current step is finished and its checkpoint is complete.
            CallbackFailed: a callback raised an exception; likewise.
        """
        self.reporter.begin(self._start)
        self.interrupt.steps_begin()
        while True:
            while self._boundary_done != self._version:
                with self._recovering():
                    self._publish_again(self._version)
                    self._boundary(self._version)
                    self._boundary_done = self._version
            if self._version == self.config.steps or self._stop_reason:
                self._stop_early()
                return
            self.reporter.step_begins(self._version)
            self.recovery.step = self._version + 1
            yield self._version

    @contextmanager
    def transaction(self, step: int) -> Iterator[None]:
        """Wraps a step. If a trainer rank fails in it, all ranks of its role are restarted, and `steps` resumes from
        the newest state that can be restored: later steps are trained again from their stored rollouts.

        Raises:
            GaveUp: no restart is left in the budget, or the same error occurred again.
        """
        with self._recovering():
            self.trained.begin_step(self.ledger, step)
            yield
            self._finish(step)

    @contextmanager
    def _recovering(self) -> Iterator[None]:
        try:
            yield
        except (RemoteError, WorkerDied, Stalled) as error:
            with self.reporter.stage("recovery"), self.interrupt.recovering():
                restored = self.trainer_recovery.recover(error, self._version)
            if restored > self._version:  # the failure came after the step was committed and copied
                self._finish(self._version)
            self._version = restored
            if self.roles.rollouts is not None:
                self.roles.rollouts.rewind()
            self._boundary_done, self._row, self._samples = -1, {}, []
            self.recovery.flush()

    def _finish(self, step: int) -> None:
        row, samples, self._row, self._samples = self._row, self._samples, {}, []
        if step > self._last_reported:
            self.reporter.step_ends(step, row, samples)
            self._last_reported, self._reported_row = step, row
        else:
            self.reporter.step_repeated(step)
        self._version = step + 1
        self.roles.data.release(*range(step + 1))

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Times and shows a stage of the current step. Before engines generate, other roles leave their devices."""
        with self.reporter.stage(name):
            if name in GENERATION_STAGES:
                self.roles.before_generation()
            yield
        self.recovery.flush()

    def collect(self, step: int) -> Rollouts:
        """Returns the scored completions of a step, which are durable from here on: they are never generated again.
        Those of a step that was collected before are the stored ones."""
        with self.stage("rollout"):
            groups = self.groups(step)  # asks the engines for this step and the next rollout.max_staleness ones
        while groups.missing:  # more than once where groups without signal are replaced
            with self.stage("rollout"):
                rollouts = self.rollouts.take(step, groups.missing)
            with self.stage("reward"):
                groups.add(self.rewards.score(rollouts))
        with self.stage("ledger"):
            self.collected(step, groups)
        return groups.rollouts

    def groups(self, step: int) -> GroupFilter:
        """Returns the step's groups: the stored ones if the step was collected before, else an empty filter.
        Submits the requests that are missing, also those of later steps up to `max_staleness`."""
        self.rollouts.request(step)
        stored = self.ledger.stored_step(step)
        generation = _require_role(self.config.generation, "generation")
        wanted, config = generation.prompts_per_step, generation.filter_groups
        if stored is None:
            return GroupFilter(step, wanted, config)
        groups = stored.rollouts.groups
        if lost := self.roles.data.restore_images(step, [group.prompt for group in groups]):
            groups[:] = [group for group in groups if group.prompt.uid not in lost]
        return GroupFilter(step, wanted, config, stored.rollouts, stored.extra)

    def collected(self, step: int, groups: GroupFilter) -> None:
        """Makes a step's scored rollouts durable, unless they come from the ledger."""
        wanted = _require_role(self.config.generation, "generation").prompts_per_step
        self._row |= self.roles.data.left_out(step, groups.rollouts.groups, wanted)
        completions = [each for group in groups.rollouts.groups for each in group.completions]
        self.roles.data.restore_observations(completions)  # those that were kept before a restart have no other source
        if groups.stored is None:
            self.ledger.record_rollouts(step, groups.rollouts, {"seed": self.seed(step), **groups.extra})
        self._samples = self.reporter.choose_samples(step, groups.rollouts)
        self._row |= rollout_metrics(groups.rollouts) | groups.metrics() | self.rollouts.metrics(step)
        self._row |= self.samples.counts([group.prompt for group in groups.rollouts.groups])

    @property
    def longest_pair(self) -> int:
        """Tokens of the longest pair of the data, with both completions."""
        return max(part.longest_pair for part in self.samples.parts if isinstance(part, PairSource))

    def pairs_fit_rows(self, longest: int) -> bool:
        """Whether pairs of up to this many tokens fit into a row with both completions. All ranks learn the answer with
        their mini-batch, so that they have the same schedule of collectives in a step."""
        return self.policy.info.packing == "forest" and longest <= self.config.token_budget

    def annotate(self, batch: TrainingBatch, without: Collection[str] = (), **others: TrainingBatch) -> None:
        """Adds to the batch's targets what the policy's objective needs before the first update of a step, such as old
        log-probabilities and those of the reference. All roles compute at the same time, unless they share devices.

        Args:
            without: fields that this step does not need.
            others: the batches of other trained roles, such as `critic=...`, which get what their objectives need.
        """
        batches = [(self.policy, batch), *((self.trained[role], each) for role, each in others.items())]
        annotate_batches(batches, self.roles.served, self.interrupt.recovering, without)

    def commit(self, step: int, stats: Sequence[Mapping[str, float]], **others: Sequence[Mapping[str, float]]) -> None:
        """Records that the step is trained.

        Args:
            stats: the metrics of the policy's optimizer steps.
            others: those of other trained roles, by role, such as `critic=...`.
        """
        joined = update_metrics(stats)
        for role, of_role in others.items():
            joined |= {f"{role}/{name}": value for name, value in update_metrics(of_role).items()}
        self._row |= {name if "/" in name else f"policy/{name}": value for name, value in joined.items()}
        self.ledger.commit(step, joined)
        self.reporter.slow_ranks(self.trained.record_loads(self.ledger, step))
        if self.memory is not None:
            with self.stage("copy"):
                self.memory.write(step + 1)

    def export(self, export: Export) -> None:
        """Writes a trained model, or its adapter."""
        folder, done = self.folder / export.folder, False
        while not done:
            with self._recovering():
                with self.stage("export"):
                    role = self.trained[export.role.name]
                    if export.form == "adapter":
                        role.export_adapter(folder)
                    else:
                        scores = role.role.model.head == "score"
                        role.export(folder, score_statistics(self.ledger, self._version) if scores else {})
                done = True
        if folder.is_relative_to(self.folder):  # it belongs to those who may use the run
            set_access(folder)

    def _publish_again(self, version: int) -> None:
        """Publishes a version whose step ended with a failure before it was published."""
        weights = self.roles.weights
        if self._boundary_done >= 0 or self.config.generation is None or weights is None:
            return
        if weights.published is not None and weights.published < version:
            with self.stage("publish"):
                weights.publish(version)

    def _evaluate(self, version: int) -> dict[str, float]:
        """Measures on held-out data what is due after `version` steps, and returns the metrics."""
        evaluator = self.roles.evaluator
        if evaluator is None:
            return {}
        metrics: dict[str, float] = {}
        samples: list[CompletionSample] = []
        for due in evaluator.due(version, last=version == self.config.steps):
            with self.stage(due.stage):
                if due.stage in GENERATION_STAGES:
                    self.weights.publish(version)
                with self.roles.data.evaluated_images():
                    measured, shown = due.measure(version)
            metrics, samples = metrics | measured, samples + shown
        if metrics:
            evaluator.record(version, metrics, samples)
        elif version > self._start:
            evaluator.report_again(version)
        return metrics

    def _call_back(self, version: int, evaluation: Mapping[str, float]) -> None:
        """Calls the callbacks if this attempt has done the last of `version` steps."""
        if self.callbacks.callbacks and self._start <= self._last_reported == version - 1:
            with self.stage("callbacks"):
                self.callbacks.call(version, {**self._reported_row, **evaluation})

    def _stop_early(self) -> None:
        """Reports that the run ends before its last step."""
        if self._version < self.config.steps:
            self.ledger.record_event(STOP_EVENT, reason=self._stop_reason, steps=self._version)
            self.reporter.console.message(f"stopped early: {self._stop_reason}")

    def _boundary(self, version: int) -> None:
        """Evaluates, calls the callbacks, and writes a checkpoint after `version` steps, if they are due; ends a run
        that was interrupted, or whose callback failed."""
        evaluator = self.roles.evaluator
        self._call_back(version, self._evaluate(version))
        early = "" if evaluator is None else stop_reason(self.config.early_stopping, evaluator.history, version)
        committed = self.ledger.committed(version - 1)
        reached = "" if committed is None else self.config.reason_to_stop(committed)
        self._stop_reason = early or reached or self.callbacks.stop_reason
        failure = self.callbacks.failure
        last = version == self.config.steps or bool(self._stop_reason)
        improved = evaluator is not None and evaluator.improved(version)
        stopping = failure is not None or (self.interrupt.requested and version > self._start)
        with self.stage("checkpoint"):
            self.checkpoints.poll()
            if self.checkpoints.due(version, last=last or stopping, improved=improved):
                metric = evaluator.metric(version) if evaluator is not None else None
                self.checkpoints.begin(version, metric)
            if last or self.interrupt.requested or failure is not None:
                self.checkpoints.finish()
        self.reporter.boundary_ends(version)
        if failure is not None:
            raise failure
        if self.interrupt.requested and not last:
            raise Interrupted(f"stopped after step {version} of {self.config.steps}")


def _require_role(role: T | None, name: str) -> T:
    if role is None:
        raise MissingRole(name)
    return role
