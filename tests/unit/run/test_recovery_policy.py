"""What is done about a failure follows from it, from what failed before, and from the budget."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.cluster.protocol import RemoteError, WorkerDied
from lockstep.cluster.service import failure
from lockstep.config.recovery import Budget, Recovery
from lockstep.config.trainer import Trainer
from lockstep.models.errors import ModelError
from lockstep.run.recovery.failures import Failure, failure_of, innermost
from lockstep.run.recovery.policy import RETRYABLE, FewerRanks, Restart, Stop, decide, fewer_ranks
from lockstep.train.checkpoint import CheckpointError
from lockstep.train.fsdp import NonFinite
from lockstep.watch.agent_client import AgentGone
from lockstep.watch.errors import CollectiveRefused, CollectiveStalled, error_code
from lockstep.watch.frames import WireError
from lockstep.watch.launch import CannotStart
from lockstep.watch.leader import Superseded
from lockstep.watch.ports import NoPort
from lockstep.watch.waits import Stalled, WaitTimeout

CONFIG = Recovery(policy=Budget(max_restarts=2, window_s=100), rollout=Budget(max_restarts=1, window_s=10))
TRACE = """Traceback (most recent call last):
  File "/x/a.py", line 3, in f
    g()
  File "/x/b.py", line 70, in g
    raise RuntimeError("no")
RuntimeError: no
"""


def died(role: str = "policy", rank: int = 0, at: float = 0.0, step: int = 0) -> Failure:
    error = WorkerDied(f"{role}-{rank}", rank, -9, "")
    return replace(failure_of(error, role, error.worker, rank, step), at=at)


def raised(kind: str, step: int = 0, trace: str = TRACE, code: str = "") -> Failure:
    return failure_of(RemoteError("policy-1", 1, kind, "no\nmore", trace, code), "policy", "policy-1", 1, step)


def test_how_a_worker_failed_is_said_in_words() -> None:
    assert died().what == "died (SIGKILL)"
    assert failure_of(WorkerDied("w", 0, 3, ""), "policy", "w", 0, 0).what == "died (exit code 3)"
    assert failure_of(WorkerDied("w", 0, None, ""), "policy", "w", 0, 0).what == "vanished"
    stalled = failure_of(Stalled("call", "w", "x", 31.0, 30.0), "policy", "w", 0, 0)
    assert (stalled.how, stalled.what) == ("stalled", "made no progress for 30 s")
    found = raised("torch.OutOfMemoryError")
    assert (found.what, found.place) == ("raised OutOfMemoryError: no", "/x/b.py:70")
    assert innermost("nothing") == ""


def test_trainer_ranks_share_a_budget_and_engines_have_one_each() -> None:
    assert decide(died("policy", 1, 50), [died("policy", 0, 10)], CONFIG) == Restart(2, CONFIG.policy)
    stop = decide(died("policy", 1, 50), [died("policy", 0, 10), died("policy", 1, 20)], CONFIG)
    assert isinstance(stop, Stop)
    assert stop.reason == ("2 restarts within 100 s are spent (recovery.policy.max_restarts 2, window_s 100)")
    assert decide(died("rollout", 1, 5), [died("rollout", 0, 1)], CONFIG) == Restart(1, CONFIG.rollout)
    assert isinstance(decide(died("rollout", 0, 5), [died("rollout", 0, 1)], CONFIG), Stop)
    assert decide(died("rollout", 0, 12), [died("rollout", 0, 1)], CONFIG) == Restart(1, CONFIG.rollout), "long ago"


def test_the_same_error_of_the_same_step_is_not_tried_a_third_time() -> None:
    first = raised("RuntimeError", 4)
    assert isinstance(decide(first, [], CONFIG), Restart)
    again = decide(raised("RuntimeError", 4), [first], CONFIG)
    assert isinstance(again, Stop) and "the same error came again in step 4" in again.reason
    assert isinstance(decide(raised("RuntimeError", 5), [first], CONFIG), Restart), "another step, other data"
    elsewhere = raised("RuntimeError", 4, TRACE.replace("line 70", "line 71"))
    assert isinstance(decide(elsewhere, [first], CONFIG), Restart)
    assert isinstance(decide(died(step=4), [died(step=4)], CONFIG), Restart), "a death is no error of data"


@pytest.mark.parametrize("kind", [NonFinite, ModelError, CheckpointError])
def test_an_error_that_says_what_is_wrong_is_not_retried(kind: type[Exception]) -> None:
    assert decide(raised(kind.__name__, code=error_code(kind)), [], CONFIG) == Stop("")


@pytest.mark.parametrize("kind", [WaitTimeout, Stalled, CollectiveStalled, CollectiveRefused, AgentGone, NoPort])
def test_a_wait_that_another_process_broke_is_worth_a_restart(kind: type[Exception]) -> None:
    assert isinstance(decide(raised(kind.__name__, code=error_code(kind)), [], CONFIG), Restart)


def test_every_retryable_code_is_declared_by_an_error() -> None:
    declared = {error_code(kind) for kind in (WaitTimeout, Stalled, CollectiveStalled, CollectiveRefused, AgentGone)}
    declared |= {error_code(kind) for kind in (NoPort, CannotStart, WireError, Superseded)}
    assert declared == RETRYABLE


@pytest.mark.parametrize("kind, action", [(WaitTimeout, Restart), (CollectiveStalled, Restart), (NonFinite, Stop)])
def test_a_class_that_moves_to_another_file_and_name_is_recognised(kind: type[Exception], action: type) -> None:
    body = {name: value for name, value in vars(kind).items() if name not in ("__dict__", "__weakref__")}
    moved = type("Renamed", kind.__bases__, body | {"__module__": "lockstep.elsewhere", "__qualname__": "Renamed"})
    message = failure(1, moved.__new__(moved))
    assert message.kind == "lockstep.elsewhere.Renamed"
    arrived = RemoteError("policy-1", 1, message.kind, message.message, message.traceback, message.code)
    assert isinstance(decide(failure_of(arrived, "policy", "policy-1", 1, 3), [], CONFIG), action)


def test_an_error_of_another_package_has_no_code() -> None:
    assert error_code(RuntimeError) == error_code(SystemExit) == error_code(Foreign) == ""


class Foreign(Exception):
    error_code = 3


def test_nothing_is_restarted_where_recovery_is_off() -> None:
    assert decide(died(), [], Recovery(enable=False)) == Stop("")


def test_fewer_ranks_after_starts_that_fail_again_and_again() -> None:
    late = replace(died(), starting=True)
    some = Recovery(fewer_ranks=True)
    assert isinstance(decide(late, [died()], some, 1), Restart), "one more try"
    assert decide(late, [died(), late], some, 1) == FewerRanks(1)
    assert isinstance(decide(late, [died(), late], some, None), Restart), "there is no smaller number"
    assert isinstance(decide(late, [died(), late], Recovery(), 1), Restart), "the config does not allow it"
    assert isinstance(decide(late, [late, died()], some, 1), Restart), "not in a row"
    assert isinstance(decide(died(), [late, late], some, 1), Restart), "they came up"


def test_as_many_copies_as_before_are_sharded_over_fewer_ranks() -> None:
    assert [fewer_ranks(Trainer(ranks=4), count) for count in (4, 2, 1)] == [3, 1, None]
    assert [fewer_ranks(Trainer(ranks=8, replicas=2), count) for count in (8, 6, 4)] == [6, 4, None]


@given(st.lists(st.floats(0, 1000), max_size=40), st.integers(0, 5), st.floats(1, 300))
def test_there_are_never_more_restarts_in_a_window_than_the_budget(
    times: list[float], most: int, window: float
) -> None:
    config = Recovery(policy=Budget(max_restarts=most, window_s=window))
    history: list[Failure] = []
    for at in sorted(times):
        failure = died(at=at)
        if isinstance(decide(failure, history, config), Restart):
            history.append(failure)
            assert sum(at - each.at <= window for each in history) <= most
