"""Restart decisions, given a failure, earlier failures and the budget."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.base.errors import CollectiveRefused, CollectiveStalled, error_code
from lockstep.base.network import NoFreePort
from lockstep.base.transport.frames import WireError
from lockstep.base.wait_state import Stalled, WaitTimeout
from lockstep.cluster.protocol import RemoteError, WorkerDied
from lockstep.cluster.rendezvous_store import RendezvousStoreLost
from lockstep.cluster.rpc.service_runner import failure_message
from lockstep.cluster.worker_failures import WorkerFailure, describe_failure, innermost_frame
from lockstep.config.fault_tolerance import RecoveryConfig, RestartBudget
from lockstep.config.trainer import TrainerConfig
from lockstep.models.errors import ModelError
from lockstep.run.recovery.restart_policy import (
    RETRYABLE,
    FewerRanks,
    RestartWorkers,
    StopRun,
    decide_recovery,
    next_smaller_ranks,
)
from lockstep.train.errors import CheckpointError, NonFinite
from lockstep.watch.agent.agent_client import AgentGone
from lockstep.watch.agent.service_discovery import Superseded
from lockstep.watch.attach.watched_command import CommandNotStarted

CONFIG = RecoveryConfig(
    policy=RestartBudget(max_restarts=2, window_s=100), rollout=RestartBudget(max_restarts=1, window_s=10)
)
TRACE = """Traceback (most recent call last):
  File "/x/a.py", line 3, in f
    g()
  File "/x/b.py", line 70, in g
    raise RuntimeError("no")
RuntimeError: no
"""


def died(role: str = "policy", rank: int = 0, at: float = 0.0, step: int = 0) -> WorkerFailure:
    error = WorkerDied(f"{role}-{rank}", rank, -9, "")
    return replace(describe_failure(error, role, error.worker, rank, step), at=at)


def raised(kind: str, step: int = 0, trace: str = TRACE, code: str = "") -> WorkerFailure:
    return describe_failure(RemoteError("policy-1", 1, kind, "no\nmore", trace, code), "policy", "policy-1", 1, step)


def test_descriptions_of_failures() -> None:
    assert died().what == "died (SIGKILL)"
    assert describe_failure(WorkerDied("w", 0, 3, ""), "policy", "w", 0, 0).what == "died (exit code 3)"
    assert describe_failure(WorkerDied("w", 0, None, ""), "policy", "w", 0, 0).what == "vanished"
    stalled = describe_failure(Stalled("call", "w", "x", 31.0, 30.0), "policy", "w", 0, 0)
    assert (stalled.how, stalled.what) == ("stalled", "made no progress for 30 s")
    found = raised("torch.OutOfMemoryError")
    assert (found.what, found.place) == ("raised OutOfMemoryError: no", "/x/b.py:70")
    assert innermost_frame("nothing") == ""


def test_trainer_ranks_share_a_budget_and_engines_have_one_each() -> None:
    assert decide_recovery(died("policy", 1, 50), [died("policy", 0, 10)], CONFIG) == RestartWorkers(2, CONFIG.policy)
    stop = decide_recovery(died("policy", 1, 50), [died("policy", 0, 10), died("policy", 1, 20)], CONFIG)
    assert isinstance(stop, StopRun)
    assert stop.reason == (
        "the limit of 2 restarts within 100 s is reached (recovery.policy.max_restarts 2, window_s 100)"
    )
    assert decide_recovery(died("rollout", 1, 5), [died("rollout", 0, 1)], CONFIG) == RestartWorkers(1, CONFIG.rollout)
    assert isinstance(decide_recovery(died("rollout", 0, 5), [died("rollout", 0, 1)], CONFIG), StopRun)
    assert decide_recovery(died("rollout", 0, 12), [died("rollout", 0, 1)], CONFIG) == RestartWorkers(
        1, CONFIG.rollout
    ), "long ago"


def test_the_ranks_of_the_reference_share_a_budget_of_their_own() -> None:
    config = CONFIG.model_copy(update={"reference": RestartBudget(max_restarts=1, window_s=100)})
    spent = [died("policy", 0, 10), died("policy", 1, 20), died("rollout", 0, 30)]
    assert decide_recovery(died("reference", 1, 50), spent, config) == RestartWorkers(1, config.reference)
    stop = decide_recovery(died("reference", 0, 60), [*spent, died("reference", 1, 50)], config)
    assert isinstance(stop, StopRun) and "recovery.reference.max_restarts 1" in stop.reason


def test_the_same_error_in_the_same_step_stops_the_run() -> None:
    first = raised("RuntimeError", 4)
    assert isinstance(decide_recovery(first, [], CONFIG), RestartWorkers)
    again = decide_recovery(raised("RuntimeError", 4), [first], CONFIG)
    assert isinstance(again, StopRun) and "the same error occurred again in step 4" in again.reason
    assert isinstance(decide_recovery(raised("RuntimeError", 5), [first], CONFIG), RestartWorkers), (
        "another step, other data"
    )
    elsewhere = raised("RuntimeError", 4, TRACE.replace("line 70", "line 71"))
    assert isinstance(decide_recovery(elsewhere, [first], CONFIG), RestartWorkers)
    assert isinstance(decide_recovery(died(step=4), [died(step=4)], CONFIG), RestartWorkers), (
        "a death is no error of data"
    )


@pytest.mark.parametrize("kind", [NonFinite, ModelError, CheckpointError])
def test_an_error_in_data_config_or_code_is_not_retried(kind: type[Exception]) -> None:
    assert decide_recovery(raised(kind.__name__, code=error_code(kind)), [], CONFIG) == StopRun("")


@pytest.mark.parametrize("kind", [WaitTimeout, Stalled, CollectiveStalled, CollectiveRefused, AgentGone, NoFreePort])
def test_a_wait_broken_by_another_process_is_restarted(kind: type[Exception]) -> None:
    assert isinstance(decide_recovery(raised(kind.__name__, code=error_code(kind)), [], CONFIG), RestartWorkers)


def test_every_retryable_code_is_declared_by_an_error() -> None:
    declared = {error_code(kind) for kind in (WaitTimeout, Stalled, CollectiveStalled, CollectiveRefused, AgentGone)}
    declared |= {error_code(kind) for kind in (NoFreePort, CommandNotStarted, WireError, Superseded)}
    declared.add(error_code(RendezvousStoreLost))
    assert declared == RETRYABLE


@pytest.mark.parametrize(
    "kind, action", [(WaitTimeout, RestartWorkers), (CollectiveStalled, RestartWorkers), (NonFinite, StopRun)]
)
def test_a_class_that_moves_to_another_file_and_name_is_recognised(kind: type[Exception], action: type) -> None:
    body = {name: value for name, value in vars(kind).items() if name not in ("__dict__", "__weakref__")}
    moved = type("Renamed", kind.__bases__, body | {"__module__": "lockstep.elsewhere", "__qualname__": "Renamed"})
    message = failure_message(1, moved.__new__(moved))
    assert message.kind == "lockstep.elsewhere.Renamed"
    arrived = RemoteError("policy-1", 1, message.kind, message.message, message.traceback, message.code)
    assert isinstance(decide_recovery(describe_failure(arrived, "policy", "policy-1", 1, 3), [], CONFIG), action)


def test_an_error_of_another_package_has_no_code() -> None:
    assert error_code(RuntimeError) == error_code(SystemExit) == error_code(Foreign) == ""


class Foreign(Exception):
    error_code = 3


def test_nothing_is_restarted_if_recovery_is_off() -> None:
    assert decide_recovery(died(), [], RecoveryConfig(enable=False)) == StopRun("")


def test_fewer_ranks_after_repeated_failed_starts() -> None:
    late = replace(died(), starting=True)
    some = RecoveryConfig(fewer_ranks=True)
    assert isinstance(decide_recovery(late, [died()], some, 1), RestartWorkers), "one more try"
    assert decide_recovery(late, [died(), late], some, 1) == FewerRanks(1)
    assert isinstance(decide_recovery(late, [died(), late], some, None), RestartWorkers), "there is no smaller number"
    assert isinstance(decide_recovery(late, [died(), late], RecoveryConfig(), 1), RestartWorkers), (
        "the config does not allow it"
    )
    assert isinstance(decide_recovery(late, [late, died()], some, 1), RestartWorkers), "not in a row"
    assert isinstance(decide_recovery(died(), [late, late], some, 1), RestartWorkers), "they came up"


def test_fewer_ranks_keep_the_number_of_replicas() -> None:
    assert [next_smaller_ranks(TrainerConfig(ranks=4), count) for count in (4, 2, 1)] == [3, 1, None]
    assert [next_smaller_ranks(TrainerConfig(ranks=8, replicas=2), count) for count in (8, 6, 4)] == [6, 4, None]


@given(st.lists(st.floats(0, 1000), max_size=40), st.integers(0, 5), st.floats(1, 300))
def test_there_are_never_more_restarts_in_a_window_than_the_budget(
    times: list[float], most: int, window: float
) -> None:
    config = RecoveryConfig(policy=RestartBudget(max_restarts=most, window_s=window))
    history: list[WorkerFailure] = []
    for at in sorted(times):
        failure = died(at=at)
        if isinstance(decide_recovery(failure, history, config), RestartWorkers):
            history.append(failure)
            assert sum(at - each.at <= window for each in history) <= most
