"""What is done about a failure: a pure function of it, of what failed before, and of the budget."""

from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.config.recovery import Budget, Recovery
from lockstep.config.trainer import Trainer
from lockstep.run.recovery.failures import Failure

RETRYABLE = frozenset(
    {
        "agent", "cannot_start", "collective_refused", "collective_stalled", "connection", "no_port", "stalled",
        "superseded", "wait_timeout",
    }
)  # fmt: skip
"""Codes of errors of this package that a restart may mend: a wait that another process broke, a collective that did
not match. All its other errors say what is wrong with data, config or code, so a retry cannot help."""


@dataclass(frozen=True, slots=True)
class Restart:
    """The worker (of the trainer: all ranks) is replaced."""

    number: int
    """Which restart within the window this is, from 1."""
    budget: Budget


@dataclass(frozen=True, slots=True)
class Stop:
    """The run ends; it can be resumed."""

    reason: str
    """Why it was not healed; empty where the error says all there is to say."""


@dataclass(frozen=True, slots=True)
class FewerRanks:
    """The trainer goes on with so many ranks: no replacement can be had."""

    ranks: int


Action = Restart | FewerRanks | Stop

TRIES = 2
"""Starts of trainer ranks that fail in a row before fewer are tried."""


def decide(failure: Failure, history: Sequence[Failure], config: Recovery, fewer: int | None = None) -> Action:
    """What to do about a failure.

    Args:
        history: what was restarted for, oldest first.
        fewer: the next smaller number of trainer ranks that would do; None where there is none.
    """
    if not config.enable:
        return Stop("")
    if failure.how == "raised":
        if failure.code and failure.code not in RETRYABLE:
            return Stop("")
        if any(failure.signature == earlier.signature for earlier in history if earlier.how == "raised"):
            return Stop(f"the same error came again in step {failure.step} after a restart; see {failure.place}")
    if fewer is not None and config.fewer_ranks and _failed_starts([*history, failure]) >= TRIES:
        return FewerRanks(fewer)
    budget = config.policy if failure.role == "policy" else config.rollout
    spent = sum(_counts(failure, earlier, budget) for earlier in history)
    if spent >= budget.max_restarts:
        return Stop(
            f"{spent} restarts within {budget.window_s:g} s are spent (recovery.{failure.role}.max_restarts "
            f"{budget.max_restarts}, window_s {budget.window_s:g})"
        )
    return Restart(spent + 1, budget)


def _counts(failure: Failure, earlier: Failure, budget: Budget) -> bool:
    """Whether an earlier restart is of the same budget: the trainer's ranks share one, every engine has its own."""
    same = earlier.role == failure.role and (failure.role == "policy" or earlier.rank == failure.rank)
    return same and failure.at - earlier.at <= budget.window_s


def _failed_starts(failures: Sequence[Failure]) -> int:
    """How many starts of trainer ranks have failed in a row, up to now."""
    ranks = [failure.starting for failure in failures if failure.role == "policy"]
    return next((number for number, starting in enumerate(reversed(ranks)) if not starting), len(ranks))


def fewer_ranks(config: Trainer, ranks: int) -> int | None:
    """The largest smaller number of ranks over which parameters can be sharded with as many copies."""
    for count in range(ranks - 1, 0, -1):
        shards, rest = divmod(count, config.replicas)
        if not rest and (config.replicas == 1 or shards > 1):
            return count
    return None
