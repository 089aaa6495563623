"""Starts a prepared run (ledger, cluster, roles, supervisor), and ends it (export, summary, shutdown)."""

import gc
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from lockstep.base.folders import run_shm_dir
from lockstep.base.limits import raise_descriptor_limit
from lockstep.base.secrets import redact_text, secret_values
from lockstep.base.text import first_line
from lockstep.cluster.agent_cluster import AgentCluster
from lockstep.cluster.cluster_factory import InheritedProcesses, open_cluster, take_over_processes
from lockstep.cluster.protocol import RemoteError, Worker
from lockstep.cluster.rpc.futures import gather_results
from lockstep.cluster.rpc.group_calls import submit_all
from lockstep.config.roles import ROLE_OF_PROCESSES, name_of_ranks
from lockstep.config.run_config import RunConfig
from lockstep.config.serve_role import reward_model_roles
from lockstep.config.train_role import TrainRole
from lockstep.ledger.errors import LedgerError
from lockstep.ledger.ledger import Ledger
from lockstep.ledger.store.mirror import StoreMirror, claim_store, mirrored
from lockstep.report.run_summary import package_versions
from lockstep.report.step_callbacks import StepCallbacks
from lockstep.rewards.model_reward import ServedModelTerm
from lockstep.rewards.reward_terms import term_names
from lockstep.rewards.scorer_pool import ScorerPool
from lockstep.rollout.client.multi_turn import make_client
from lockstep.rollout.client.rollout_client import RolloutClient
from lockstep.rollout.engine_protocol import EngineAPI
from lockstep.run.checkpoint_manager import restore_checkpoint
from lockstep.run.devices.device_turns import DeviceTurns, EngineTurn, divide_into_waves, turns_by_role
from lockstep.run.errors import Interrupted, NotStarted, RunRefused
from lockstep.run.evaluation.evaluator import CompletionQuality, Evaluator, Measurement, PairAccuracy, ValidationLoss
from lockstep.run.interrupt import InterruptHandler
from lockstep.run.planning.parent_run import begin_from
from lockstep.run.planning.prepare import PreparedRun
from lockstep.run.planning.working_folder import START_EVENT, start_folders
from lockstep.run.recovery.recovery_manager import RecoveryManager
from lockstep.run.recovery.trainer_recovery import MemoryCheckpointer, RecoveryContext
from lockstep.run.rollout_buffer import PromptSampler, RolloutBuffer
from lockstep.run.run import Run, RunRoles
from lockstep.run.run_id import claim_run_id
from lockstep.run.run_reporter import RunReporter, controller_logging
from lockstep.run.served_roles import ServedGroup, ServedScorer
from lockstep.run.trained_roles import TrainedRoles
from lockstep.run.trainer_group import TrainerGroup, set_up_ranks
from lockstep.run.weight_sync import WeightPublisher, make_device_sync, make_weight_delivery
from lockstep.run.worker_launcher import RunWorkerLauncher
from lockstep.train.errors import CheckpointError
from lockstep.train.trainer_api import TrainerInfo
from lockstep.watch.beacon.writer import open_beacon
from lockstep.watch.diagnosis.evidence_types import WaitAlias
from lockstep.watch.diagnosis.verdict import StallThresholds
from lockstep.watch.supervisor.timeline_capture import CAPTURES_FOLDER, CaptureRequest, request_capture

log = logging.getLogger(__name__)

GC_THRESHOLD = 500_000
"""Net allocations before Python's garbage collector looks for cycles: more than are alive in a step of some thousand
completions. With Python's default of 700 it runs some hundred times in such a step, which takes a sixth of the
controller's time; with 50,000 once, which takes 15 ms."""


@contextmanager
def open_run(prepared: PreparedRun) -> Iterator[Run]:
    """Starts everything, yields the run, and stops everything, whatever happens.

    Raises:
        RunRefused: the folder cannot be created, or another process has this run open; nothing was started.
        NotStarted: a role of a new run could not start; the run's name can be used again.
        RemoteError, WorkerDied, RewardError: a role of a resumed run could not start.
    """
    raise_descriptor_limit()
    ledger, mirror = _open_ledger(prepared)
    started = False
    try:
        with ExitStack() as stack:
            stack.enter_context(ledger)
            counts = {"rows": prepared.rows, "row_counts": prepared.row_counts, "row_digests": prepared.row_digests}
            compiles = dict(prepared.plan.compile)
            ledger.record_event(START_EVENT, **counts, compile=compiles, **start_folders(prepared.folder))
            if prepared.parent is not None:
                begin_from(prepared.parent, ledger, prepared.config)
            prepared.data.store_images()
            interrupt = InterruptHandler()
            stack.enter_context(interrupt.listening())
            config, wanted = prepared.config, prepared.plan.wanted
            inherited = take_over_processes(
                config.cluster, prepared.folder, ledger.generation, wanted, config.placement
            )
            name = claim_run_id(prepared.folder, prepared.config.name) if inherited is None else inherited.run
            reporter = RunReporter(prepared.config, prepared.folder, ledger, name, prepared.events)
            stack.callback(reporter.close)
            stack.enter_context(controller_logging(prepared.folder / "logs" / "controller.log", reporter.console))
            exports = [export.folder for export in prepared.config.exports]
            stack.enter_context(mirrored(mirror, ledger, exports, reporter.console.warning))
            run = stack.enter_context(_start_run(prepared, ledger, reporter, interrupt, name, inherited))
            stack.enter_context(finalize_run(run))
            started = True
            yield run
    except Exception as error:
        if started or prepared.resuming or not _owns_run(ledger):
            raise
        raise NotStarted(prepared.folder, _rename_failed_folder(prepared.folder)) from error


@contextmanager
def finalize_run(run: Run) -> Iterator[None]:
    """Wraps a recipe: exports the model if the recipe completes, and reports the end in any case."""
    try:
        yield
        for export in run.config.exports:
            run.export(export)
    except (Interrupted, KeyboardInterrupt):
        _report_end(run, "interrupted")
        raise
    except BaseException as error:
        _report_end(run, f"failed: {type(error).__name__}: {first_line(error)}")
        raise
    _report_end(run, "finished")


@contextmanager
def infrequent_gc() -> Iterator[None]:
    """Excludes all objects that exist now from garbage collection, as they live as long as the run, and collects cycles
    among later ones rarely. Arrays and other objects outside of cycles are freed immediately, as always."""
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


def start_supervisor(
    prepared: PreparedRun, cluster: AgentCluster, run: str, reporter: RunReporter, recovery: RecoveryManager
) -> None:
    """Starts the supervisor, if the config enables it. Does not wait for it."""
    config = prepared.config.watch
    if not config.enable:
        return
    recovers = config.on_stall == "recover" and prepared.config.recovery.enable
    names = [role.name for role in prepared.config.train_roles] + [role.name for role in prepared.config.serve_roles]
    aliases = {**ROLE_OF_PROCESSES, **{name_of_ranks(name): name for name in names}}
    if recovers:
        recovery.listen(reporter.verdicts, cluster.kill)
    cluster.supervise(
        StallThresholds(notice_s=config.notice_s, still_s=config.confirm_after_s),
        reporter.verdicts.handle,
        on_stall="free" if recovers else "dump" if config.on_stall == "dump" else "report",
        aliases={name: WaitAlias(role) for name, role in aliases.items()},
        facts={
            "config": prepared.config.model_dump(mode="json"),
            "versions": package_versions(),
            "command": sys.argv,
            "folder": str(prepared.folder),
        },
    )
    if (steps := prepared.config.report.timeline) is not None:
        name = f"steps-{steps.first_step}-{steps.last_step}-{time.strftime('%Y%m%d-%H%M%S')}.jsonl"
        file = prepared.folder.absolute() / CAPTURES_FOLDER / name
        request_capture(run, CaptureRequest(file, first_step=steps.first_step, last_step=steps.last_step))


def _umask_mode() -> int:
    """The mode that the umask gives a folder. It can be read only by setting it."""
    umask = os.umask(0o077)
    os.umask(umask)
    return 0o777 & ~umask


_FOLDER_MODES: Mapping[str, Callable[[], int]] = {
    "private": lambda: 0o700,
    "group": lambda: 0o2770,  # files and folders in it belong to its group as well
    "umask": _umask_mode,
}


def _open_ledger(prepared: PreparedRun) -> tuple[Ledger, StoreMirror | None]:
    """Opens the ledger, and becomes the writer of the run's copy in its store before anything is written."""
    config, folder = prepared.config, prepared.folder
    try:
        mirror = claim_store(config.store, config.name, config.folder, folder if prepared.resuming else None)
        values = config.model_dump(mode="json")
        if prepared.resuming:
            return Ledger.resume(folder, values), mirror
        return Ledger.create(folder, values, _FOLDER_MODES[config.folder_access]()), mirror
    except (LedgerError, OSError) as error:
        raise RunRefused(str(error)) from error


def _owns_run(ledger: Ledger) -> bool:
    """Whether no other process has claimed the run in the meantime."""
    try:
        with Ledger.reader(ledger.folder) as current:
            return current.generation == ledger.generation
    except (LedgerError, OSError):
        return True


def _rename_failed_folder(folder: Path) -> Path | None:
    """Renames the folder of a run that did not start, so that the name can be used again; its logs may show why.
    Returns the new path, or None if the folder cannot be renamed."""
    kept = folder.with_name(f"{folder.name}.failed-{time.strftime('%Y%m%d-%H%M%S')}")
    try:
        folder.rename(kept)
    except OSError as error:
        log.warning("%s cannot be renamed: %s", folder, error)
        return None
    return kept


def _report_end(run: Run, reason: str) -> None:
    reason = redact_text(reason, secret_values(os.environ))
    try:
        run.recovery.flush()
        run.ledger.record_event("end", reason=reason, steps=run.ledger.steps_done())
        run.reporter.finish(reason)
    except (LedgerError, OSError) as error:
        # Not raised: if a full disk ended the run, its first error is the one to report.
        log.warning("summary and report could not be written: %s", error)


@contextmanager
def _start_run(
    prepared: PreparedRun,
    ledger: Ledger,
    reporter: RunReporter,
    interrupt: InterruptHandler,
    name: str,
    inherited: InheritedProcesses,
) -> Iterator[Run]:
    open_beacon(name, "controller", "controller", 0)
    config, wanted = prepared.config, prepared.plan.wanted
    identity = name, prepared.folder, ledger.generation
    with reporter.stage("start"):
        cluster = open_cluster(config.cluster, *identity, inherited, wanted, config.placement, prepared.agent)
    reporter.worker_activity = cluster.describe_worker
    with ExitStack() as closing:
        closing.callback(cluster.close)
        recovery = RecoveryManager(prepared.config.recovery, ledger)
        start_supervisor(prepared, cluster, name, reporter, recovery)
        with reporter.stage("start"):
            launcher = RunWorkerLauncher(prepared, cluster, ledger.generation)
            ranks, servers, workers = launcher.launch_all()
            turns, engines, engine_turn = turns_by_role(config), None, None
            if workers:
                _warn_slow_engines(workers)
                sampled = prepared.config.rollout, prepared.config.seed, prepared.config.cluster.stall_limit_s
                engines = make_client(
                    cluster, workers, *sampled, prepared.data.turns, launcher, recovery, note=recovery.note
                )
                closing.callback(engines.close)
                engine_turn = EngineTurn(turns["rollout"], engines)  # they are on the devices, and leave them first
            served = [
                ServedGroup(
                    role, [w for w in servers if w.spec.role == role.name], launcher, recovery, turns[role.name]
                )
                for role in config.serve_roles
            ]
            trained = _set_up_models(prepared, ranks, served, turns)
            start = _restore(prepared, ledger, trained)
            terms = _served_terms(config, served, interrupt)
            roles = RunRoles(trained, prepared.data, engines, served=served, engine_turn=engine_turn)
            _add_roles(roles, prepared, ledger, reporter, launcher, recovery, start, terms)
            memory = MemoryCheckpointer(trained, run_shm_dir(name) / "state") if prepared.plan.memory_copy else None
            cluster.release()
        context = RecoveryContext(recovery, launcher, memory)
        closing.enter_context(infrequent_gc())
        callbacks = StepCallbacks(prepared.callbacks)
        yield Run(prepared.config, prepared.folder, ledger, roles, reporter, interrupt, start, context, callbacks)


def _set_up_models(
    prepared: PreparedRun, workers: Sequence[Worker], served: Sequence[ServedGroup], turns: Mapping[str, DeviceTurns]
) -> TrainedRoles:
    """Makes all ranks load their models, at the same time except for roles that share devices."""
    roles = prepared.config.train_roles
    everything: list[TrainRole | ServedGroup] = [*served, *reversed(roles)]  # so that the policy is the last
    groups: dict[str, TrainerGroup] = {}

    def turns_of(each: TrainRole | ServedGroup) -> DeviceTurns:
        return turns[each.name] if isinstance(each, TrainRole) else each.turns

    for wave in divide_into_waves(everything, turns_of):
        loading = [each for each in wave if isinstance(each, ServedGroup)]
        for each in loading:
            each.begin_setup()
        trained = {role.name: role for role in roles if role in wave}
        for name in trained:
            turns[name].begin()
        ready = set_up_ranks([worker for worker in workers if worker.spec.role in trained])
        groups |= {name: TrainerGroup(*ready[name], role, turns[name]) for name, role in trained.items()}
        for each in loading:
            each.finish_setup()
    return TrainedRoles([groups[role.name] for role in roles])


def _restore(prepared: PreparedRun, ledger: Ledger, trained: TrainedRoles) -> int:
    """Loads the newest checkpoint into the trained roles. Returns the number of steps done."""
    for group in trained.values():
        name = f"{group.role.name}: " if len(trained) > 1 else ""
        _log_packing(name, group.role, group.info)
        if group.info.slower:
            log.warning("%s%s", name, group.info.slower)
    try:
        start = restore_checkpoint(trained, ledger)
    except RemoteError as error:
        if prepared.parent is None or error.code != CheckpointError.error_code:
            raise
        raise prepared.parent.unusable(f"cannot be loaded ({error.message})") from error
    _warn_new_heads(prepared, list(trained.values()), start)
    return start


def _warn_new_heads(prepared: PreparedRun, groups: Sequence[TrainerGroup], start: int) -> None:
    """Warns of score heads that begin with random values, because no checkpoint or adapter had them."""
    for group in groups:
        adapter = group.role.model.adapter
        loaded = start > 0 or prepared.parent is not None or (adapter is not None and adapter.path is not None)
        if group.info.has_new_head and not loaded:
            path = group.role.model.path
            log.warning("%s has no score head, so a new one is trained from random values", path)


def _log_packing(name: str, role: TrainRole, info: TrainerInfo) -> None:
    """Logs the packing mode, as a warning if training is slower than the user may expect."""
    chosen = role.model.packing != "auto"
    notes = {
        "forest": "",
        "block": ": prompts are not shared",
        "single": ": one sample per row, which is slower",
    }
    level = logging.INFO if chosen or info.packing == "forest" else logging.WARNING
    log.log(level, "%spacking %s%s (%s)", name, info.packing, notes[info.packing], info.packing_reason)


def _warn_slow_engines(engines: list[Worker]) -> None:
    """Warns if the model decodes slowly on the engines, with the reason."""
    reasons = gather_results(submit_all(engines, EngineAPI.slower, [()] * len(engines)), why="load the model")
    for reason in dict.fromkeys(reasons):
        if reason:
            log.warning("%s", reason)


def _served_terms(
    config: RunConfig, served: Sequence[ServedGroup], interrupt: InterruptHandler
) -> dict[int, ServedModelTerm]:
    """The reward terms that served models compute, by their index."""
    groups, found = {group.role.name: group for group in served}, {}
    for index, role in reward_model_roles(config).items():
        assert config.reward is not None
        scorer = ServedScorer(groups[role.name], interrupt.recovering)
        term, name = config.reward.served_models[index], term_names(config.reward.terms)[index]
        found[index] = ServedModelTerm(term, name, scorer, config.token_budget)
    return found


def _add_roles(
    roles: RunRoles,
    prepared: PreparedRun,
    ledger: Ledger,
    reporter: RunReporter,
    launcher: RunWorkerLauncher,
    recovery: RecoveryManager,
    version: int,
    terms: Mapping[int, ServedModelTerm],
) -> None:
    """Adds what the run needs besides models and engines: scorers, evaluation, and what belongs to engines."""
    config, cluster, policy, engines = prepared.config, launcher.cluster, roles.trained.policy, roles.engines
    if config.reward is not None:
        scored = prepared.data.scored
        roles.rewards = ScorerPool(
            cluster, config.reward, data=scored, note=recovery.note, served=terms, images=prepared.images
        )
        roles.rewards.start()
    measurements: list[Measurement] = []
    if (validation := config.held_out_samples) is not None:
        held_out = validation.every, prepared.data.validation, policy, config.token_budget
        measurements.append(PairAccuracy(*held_out) if config.head == "score" else ValidationLoss(*held_out))
    if engines is not None:
        _add_engine_roles(roles, prepared, ledger, launcher, engines, version)
    if config.evaluation is not None and engines is not None:
        prompts, sampling = prepared.data.held_out, config.rollout.sampling
        measurements.append(CompletionQuality(config.evaluation, prompts, sampling, engines, roles.rewards))
    if measurements:
        roles.evaluator = Evaluator(measurements, ledger, reporter)


def _add_engine_roles(
    roles: RunRoles,
    prepared: PreparedRun,
    ledger: Ledger,
    launcher: RunWorkerLauncher,
    engines: RolloutClient,
    version: int,
) -> None:
    """Adds what a run with engines has: they get the weights of `version`, and prompts to complete."""
    config, cluster, policy = prepared.config, launcher.cluster, roles.trained.policy
    setup = prepared, policy, engines.workers, cluster, launcher
    delivery, devices = make_weight_delivery(*setup), make_device_sync(*setup)
    roles.weights = WeightPublisher(policy, engines, delivery, ledger, devices, roles.before_generation)
    roles.weights.open_on_ranks()
    roles.weights.publish(version)
    if (wanted := config.generation) is not None:
        sampler = PromptSampler(prepared.data.take, ledger, wanted.prompts_per_step, wanted.filter_groups.enable)
        size, staleness = wanted.group_size, config.rollout.max_staleness
        roles.rollouts = RolloutBuffer(engines, ledger, sampler, size, config.steps, staleness)
