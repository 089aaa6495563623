"""From a prepared run to a running one: ledger, cluster, roles; and back down again."""

import logging
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from lockstep.cluster.calls import gather
from lockstep.cluster.opening import Inherited, inherit, open_cluster
from lockstep.cluster.protocol import Worker
from lockstep.ledger.errors import LedgerError
from lockstep.ledger.ledger import Ledger
from lockstep.rewards.pool import ScorerPool
from lockstep.rollout.environments.pool import EnvironmentPool
from lockstep.run.buffer import RolloutBuffer
from lockstep.run.checkpoints import restore
from lockstep.run.collector import rare_collections
from lockstep.run.draws import PromptDraws
from lockstep.run.engines import Engines
from lockstep.run.errors import NotStarted, Refused
from lockstep.run.evaluate import Evaluator
from lockstep.run.finish import finished
from lockstep.run.interrupt import Interrupt
from lockstep.run.logs import logged
from lockstep.run.monitor import Monitor
from lockstep.run.oversight import oversee
from lockstep.run.place import take_place
from lockstep.run.policy import Policy, set_up
from lockstep.run.prepare import START, Prepared
from lockstep.run.publish import WeightSync, delivery_of, devices_sync_of
from lockstep.run.recovery.memory import MemoryCopy
from lockstep.run.recovery.recovery import Recovery
from lockstep.run.recovery.trainers import Healing
from lockstep.run.run import Roles, Run
from lockstep.run.services import EngineAPI
from lockstep.run.staff import Staff
from lockstep.run.turns import Conversations
from lockstep.train.api import TrainerInfo
from lockstep.watch import beacon
from lockstep.watch.folders import run_dir

log = logging.getLogger(__name__)


@contextmanager
def open_run(prepared: Prepared) -> Iterator[Run]:
    """Starts everything, hands the run out, and stops everything, whatever happens.

    Raises:
        Refused: the folder cannot be made, or another process runs this run; nothing was started.
        NotStarted: a role of a new run could not start; its name is free for the next try.
        RemoteError, WorkerDied, RewardError: a role of a resumed run could not start.
    """
    ledger = _ledger(prepared)
    started = False
    try:
        with ExitStack() as stack:
            stack.enter_context(ledger)
            ledger.event(START, rows=prepared.rows)
            interrupt = Interrupt()
            stack.enter_context(interrupt.listening())
            config, wanted = prepared.config, prepared.plan.wanted
            heritage = inherit(config.cluster, prepared.folder, ledger.generation, wanted, config.placement)
            name = take_place(prepared.folder, prepared.config.name) if heritage is None else heritage.run
            monitor = Monitor(prepared.config, prepared.folder, ledger, name)
            stack.callback(monitor.close)
            stack.enter_context(logged(prepared.folder / "logs" / "controller.log", monitor.console))
            run = stack.enter_context(_running(prepared, ledger, monitor, interrupt, name, heritage))
            stack.enter_context(finished(run))
            started = True
            yield run
    except Exception as error:
        if started or prepared.resuming or not _ours(ledger):
            raise
        raise NotStarted(prepared.folder, _set_aside(prepared.folder)) from error


def _ledger(prepared: Prepared) -> Ledger:
    config = prepared.config.model_dump(mode="json")
    try:
        if prepared.resuming:
            return Ledger.resume(prepared.folder, config)
        return Ledger.create(prepared.folder, config)
    except (LedgerError, OSError) as error:
        raise Refused(str(error)) from error


def _ours(ledger: Ledger) -> bool:
    """Whether no other process has claimed the run since."""
    try:
        with Ledger.reader(ledger.folder) as now:
            return now.generation == ledger.generation
    except (LedgerError, OSError):
        return True


def _set_aside(folder: Path) -> Path | None:
    """Frees the name of a run that never began. What it left may say why, so it is kept; where to, or None where the
    file system does not let it be moved."""
    kept = folder.with_name(f"{folder.name}.failed-{time.strftime('%Y%m%d-%H%M%S')}")
    try:
        folder.rename(kept)
    except OSError as error:
        log.warning("%s cannot be renamed: %s", folder, error)
        return None
    return kept


@contextmanager
def _running(
    prepared: Prepared,
    ledger: Ledger,
    monitor: Monitor,
    interrupt: Interrupt,
    name: str,
    heritage: Inherited,
) -> Iterator[Run]:
    beacon.open_beacon(name, "controller", "controller", 0)
    config, wanted = prepared.config, prepared.plan.wanted
    place = name, prepared.folder, ledger.generation
    with monitor.stage("start"):
        cluster = open_cluster(config.cluster, *place, heritage, wanted, config.placement)
    monitor.doing = cluster.doing
    with ExitStack() as closing:
        closing.callback(cluster.close)
        recovery = Recovery(prepared.config.recovery, ledger)
        oversee(prepared, cluster, monitor, recovery)
        with monitor.stage("start"):
            staff = Staff(prepared, cluster, ledger.generation)
            ranks, workers = everybody(prepared, staff)
            policy, start = _policy(prepared, ledger, ranks)
            engines = _engines(prepared, staff, recovery, workers)
            if engines is not None:
                closing.callback(engines.close)
            roles = _roles(prepared, ledger, monitor, staff, policy, engines, start)
            memory = MemoryCopy(policy, run_dir(name) / "state") if prepared.plan.memory_copy else None
            cluster.release()
        healing = Healing(recovery, staff, memory)
        closing.enter_context(rare_collections())
        yield Run(prepared.config, prepared.folder, ledger, roles, monitor, interrupt, start, healing)


def everybody(prepared: Prepared, staff: Staff) -> tuple[list[Worker], list[Worker]]:
    """Trainer ranks and engines. Engines that share devices have them alone as they start, and have left them when the
    ranks are set up: vLLM refuses where less than its share of a GPU is free, and where memory comes and goes while it
    measures its own."""
    ranks, engines = staff.everybody()
    if prepared.config.placement.shared:
        gather([engine.submit(EngineAPI.sleep) for engine in engines], why="leave the devices")
    return ranks, engines


def _policy(prepared: Prepared, ledger: Ledger, workers: list[Worker]) -> tuple[Policy, int]:
    """The trainer ranks, with the newest checkpoint loaded, and the version they are at."""
    policy = Policy(workers, set_up(workers), prepared.config.trainer.offload)
    _tell_packing(prepared, policy.info)
    if policy.info.slower:
        log.warning("%s", policy.info.slower)
    return policy, restore(policy, ledger)


def _tell_packing(prepared: Prepared, info: TrainerInfo) -> None:
    """A model that cannot be packed fully trains slower than its user may expect: that is said, not just logged."""
    chosen = prepared.config.model.packing != "auto"
    means = {"forest": "", "block": ": prompts are not shared", "single": ": one sample per row, which is slower"}
    level = logging.INFO if chosen or info.packing == "forest" else logging.WARNING
    log.log(level, "packing %s%s (%s)", info.packing, means[info.packing], info.packing_reason)


def _tell_slower(engines: list[Worker]) -> None:
    """A model that engines decode slowly is said as well; all engines have the same one."""
    for reason in dict.fromkeys(gather([worker.submit(EngineAPI.slower) for worker in engines], why="load the model")):
        if reason:
            log.warning("%s", reason)


def _roles(
    prepared: Prepared,
    ledger: Ledger,
    monitor: Monitor,
    staff: Staff,
    policy: Policy,
    engines: Engines | None,
    version: int,
) -> Roles:
    config, cluster = prepared.config, staff.cluster
    roles = Roles(policy, documents=prepared.documents)
    if config.reward is not None:
        roles.rewards = ScorerPool(cluster, config.reward)
        roles.rewards.start()
    if engines is None:
        return roles
    roles.engines = engines
    where = prepared, policy, engines.workers, cluster, staff
    roles.weights = WeightSync(policy, engines, delivery_of(*where), ledger, devices_sync_of(*where))
    roles.weights.open_on_ranks()
    roles.weights.publish(version)
    if config.recipe == "grpo" and prepared.prompts is not None:
        draws = PromptDraws(prepared.prompts, ledger, config.prompts_per_step, config.filter_groups.enable)
        size, ahead = config.group_size, config.rollout.max_staleness
        roles.rollouts = RolloutBuffer(engines, ledger, draws, size, config.steps, ahead)
    if config.evaluation is not None:
        roles.evaluator = Evaluator(
            config.evaluation,
            prepared.held_out,
            config.rollout.sampling,
            engines,
            roles.rewards,
            ledger,
            monitor,
        )
    return roles


def _engines(prepared: Prepared, staff: Staff, recovery: Recovery, workers: list[Worker]) -> Engines | None:
    """Engines whose completions are conversations where the config names an environment; None where none is needed."""
    if not workers:
        return None
    _tell_slower(workers)
    config = prepared.config
    sampling, stall_s = config.rollout.sampling, config.cluster.stall_limit_s
    if prepared.turns is None or config.rollout.environment is None:
        return Engines(workers, sampling, config.seed, stall_s, staff, recovery, config.rollout.reissue)
    pool = EnvironmentPool(staff.cluster, config.rollout.environment)
    pool.start()
    common = sampling, config.seed, stall_s, staff, recovery, config.rollout.reissue
    return Conversations(workers, *common, pool=pool, turns=prepared.turns)
