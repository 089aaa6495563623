"""Decides what to do about a failure. The decision depends only on the failure, earlier failures and the config."""

from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.cluster.worker_failures import WorkerFailure
from lockstep.config.fault_tolerance import RecoveryConfig, RestartBudget
from lockstep.config.roles import REWARD_MODEL, ROLES_WITHOUT_RANKS, section_of_role
from lockstep.config.trainer import TrainerConfig

RETRYABLE = frozenset(
    {
        "agent", "cannot_start", "collective_refused", "collective_stalled", "connection", "no_port",
        "rendezvous_store", "stalled", "superseded", "wait_timeout",
    }
)  # fmt: skip
"""Codes of errors of this package that a restart may fix: a wait that failed because of another process, a mismatched
collective. All other errors of this package report wrong data, config or code, so a retry cannot help."""


@dataclass(frozen=True, slots=True)
class RestartWorkers:
    """Replace the failed worker; if it is a rank of a model, replace all ranks of its role."""

    number: int
    """Number of this restart within the window, from 1."""
    budget: RestartBudget


@dataclass(frozen=True, slots=True)
class StopRun:
    """End the run, which can be resumed later."""

    reason: str
    """Why there is no restart; "" if the error needs no further explanation."""


@dataclass(frozen=True, slots=True)
class FewerRanks:
    """Continue training with fewer ranks, because no replacement is available."""

    ranks: int


RecoveryAction = RestartWorkers | FewerRanks | StopRun

MAX_FAILED_STARTS = 2
"""Failed starts of trainer ranks in a row, after which fewer ranks are started."""


def decide_recovery(
    failure: WorkerFailure, history: Sequence[WorkerFailure], config: RecoveryConfig, fewer: int | None = None
) -> RecoveryAction:
    """Decides what to do about a failure.

    Args:
        history: failures that were followed by a restart, oldest first.
        fewer: the next smaller possible number of trainer ranks; None if there is none.
    """
    if not config.enable:
        return StopRun("")
    if failure.how == "raised":
        if failure.code and failure.code not in RETRYABLE:
            return StopRun("")
        if any(failure.signature == earlier.signature for earlier in history if earlier.how == "raised"):
            return StopRun(f"the same error occurred again in step {failure.step} after a restart; see {failure.place}")
    starts = [each for each in (*history, failure) if each.role == failure.role]
    if fewer is not None and config.fewer_ranks and _failed_starts(starts) >= MAX_FAILED_STARTS:
        return FewerRanks(fewer)
    field = section_of_role(failure.role)
    field = field if field in ("rollout", "reference", REWARD_MODEL) else "policy"
    budget: RestartBudget = getattr(config, field)
    spent = sum(_in_same_budget(failure, earlier, budget) for earlier in history)
    if spent >= budget.max_restarts:
        return StopRun(
            f"the limit of {budget.max_restarts} restarts within {budget.window_s:g} s is reached "
            f"(recovery.{field}.max_restarts {budget.max_restarts}, window_s {budget.window_s:g})"
        )
    return RestartWorkers(spent + 1, budget)


def _in_same_budget(failure: WorkerFailure, earlier: WorkerFailure, budget: RestartBudget) -> bool:
    """Whether an earlier restart is in the same budget: all ranks of a model share one, each engine has its own."""
    together = failure.role not in ROLES_WITHOUT_RANKS
    same = earlier.role == failure.role and (together or earlier.rank == failure.rank)
    return same and failure.at - earlier.at <= budget.window_s


def _failed_starts(failures: Sequence[WorkerFailure]) -> int:
    """Counts the latest starts of a role's ranks that failed in a row."""
    was_starting = [failure.starting for failure in failures]
    return next((number for number, starting in enumerate(reversed(was_starting)) if not starting), len(was_starting))


def next_smaller_ranks(config: TrainerConfig, ranks: int) -> int | None:
    """The largest smaller number of ranks that allows the same number of replicas; None if there is none.

    If there are several replicas, each must keep at least two ranks.
    """
    for count in range(ranks - 1, 0, -1):
        shards, rest = divmod(count, config.replicas)
        if not rest and (config.replicas == 1 or shards > 1):
            return count
    return None
