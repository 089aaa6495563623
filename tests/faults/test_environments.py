"""The environment pool on real processes."""

import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from lockstep.base import waits
from lockstep.config.rollout import EnvironmentConfig
from lockstep.data.samples import Prompt
from lockstep.rollout.environments.environment_pool import EnvironmentPool, EpisodeReply
from lockstep.rollout.environments.environment_protocol import EnvironmentFailed

HERE = Path(__file__).parent


@pytest.fixture
def pool(cluster):
    made = []

    def make(name=None, **options):
        if name is not None:
            options["path"] = f"environments.py:{name}"
        made.append(EnvironmentPool(cluster, EnvironmentConfig(**options), HERE))
        made[-1].start()
        return made[-1]

    yield make
    for each in made:
        each.close()


def prompt(uid="0:7"):
    return Prompt(uid, 7, np.arange(3, dtype=np.int32), "say ok: ", None, "ok", {"source": "test"})


def replies(pool: EnvironmentPool, count: int, within_s: float = 20.0) -> dict[str, EpisodeReply]:
    found: list[EpisodeReply] = []

    def look() -> bool | None:
        found.extend(pool.collect())
        return True if len(found) >= count else None

    waits.poll(look, kind="queue", waits_for="environments", why="replies", timeout_s=within_s, every_s=0.01)
    assert len(found) == count
    return {reply.episode: reply for reply in found}


def ask(pool: EnvironmentPool, **actions: str) -> dict[str, EpisodeReply]:
    for episode, action in actions.items():
        pool.step(episode, action)
    return replies(pool, len(actions))


def begin(pool: EnvironmentPool, *episodes: str) -> dict[str, EpisodeReply]:
    for episode in episodes:
        pool.begin(episode, prompt())
    return replies(pool, len(episodes)) if pool.resets else {}


def test_conversations_are_independent(pool):
    made = pool("Counting", arguments={"until": 2}, workers=2)
    assert {r.observation.text for r in begin(made, "a", "b", "c").values()} == {"begin 0:7. "}
    first = ask(made, a="x", b="y")
    assert first["a"].observation.text == "[1:x]" and not first["b"].observation.done
    last = ask(made, a="z", c="w")
    assert last["a"].observation.done and last["a"].observation.text == "[2:z]"
    assert (last["c"].observation.reward, last["c"].observation.metrics) == (0.5, {"seen": 1.0})
    made.forget(["a", "b", "c"])
    assert made.collect() == []


def test_fast_environments_do_not_wait_for_slow_ones(pool):
    made = pool("Slow")
    begin(made, "slow", "quick")
    made.step("slow", "5")
    began = time.monotonic()
    for _ in range(3):
        made.step("quick", "0.01")
        (reply,) = replies(made, 1).values()
        assert reply.episode == "quick" and reply.observation.text == "waited 0.01"
    assert time.monotonic() - began < 4


@pytest.mark.parametrize(
    "action, problem, line",
    [
        ("raise", "raised RuntimeError: the world ended", 'raise RuntimeError("the world ended")'),
        ("nothing", "step returned NoneType, expected an Observation or text", ""),
        ("nan", "the reward nan is not a finite number", ""),
    ],
)
def test_exceptions_and_invalid_results_are_reported(pool, action, problem, line):
    made = pool("Faulty")
    begin(made, "a")
    failure = ask(made, a=action)["a"].failure
    assert problem in failure.problem and line in failure.traceback
    assert ask(made, a="on")["a"].observation.text == "[1:on]", "and the conversation may continue"


@pytest.mark.parametrize(
    "name, action, problem",
    [
        ("Faulty", "hang", "did not answer within 0.5 s"),
        ("AsyncFaulty", "hang", "did not answer within 0.5 s"),
        ("Faulty", "held", "did not answer within 0.5 s"),
        ("Faulty", "exit", "its process exited with 7"),
        ("AsyncFaulty", "sleep", "did not answer within 0.5 s"),
    ],
)
def test_a_hanging_environment_is_named_and_others_continue(pool, monkeypatch, name, action, problem):
    monkeypatch.setattr("lockstep.rollout.environments.environment_process.DEATH_LOG_S", 1.0)
    made = pool(name, timeout_s=0.5)
    begin(made, "good", "bad", "idle")
    ask(made, good="1", bad="2", idle="3")
    found = ask(made, bad=action)
    assert problem in found["bad"].failure.problem
    if action == "hang":
        assert "time.sleep(1000)" in found["bad"].failure.traceback or "in step" in found["bad"].failure.traceback
    later = ask(made, good="4", bad="5", idle="6")
    assert [later[each].observation.text for each in ("good", "bad", "idle")] == ["[2:4]", "[2:5]", "[2:6]"]


def test_a_killed_process_loses_no_reply(pool):
    made = pool("Slow", timeout_s=20)
    begin(made, "a", "b")
    made.step("a", "0.5")
    made.step("b", "0.6")
    made.collect()
    os.kill(made._processes[0]._worker.pid, signal.SIGKILL)
    assert {reply.observation.text for reply in replies(made, 2).values()} == {"waited 0.5", "waited 0.6"}


def test_an_environment_that_replies_differently_in_a_replay_is_reported(pool):
    made = pool("Dice")
    begin(made, "a", "b")
    ask(made, a="x", b="y")
    assert "exited with 7" in ask(made, a="exit")["a"].failure.problem
    assert "NondeterministicEnvironment" in ask(made, b="z")["b"].failure.problem


def test_a_branch_starts_in_the_state_of_its_origin(pool):
    made = pool("Counting")
    begin(made, "a")
    ask(made, a="x")
    made.branch("a", "b")
    found = ask(made, a="y", b="z")
    assert (found["a"].observation.text, found["b"].observation.text) == ("[2:y]", "[2:z]")


def test_without_a_reset_there_is_no_first_reply(pool):
    made = pool("NoReset")
    assert not made.resets
    begin(made, "a")
    assert ask(made, a="x")["a"].observation.done


@pytest.mark.parametrize("name, words", [("NoStep", "not a class with a method step"), ("missing", "has no 'missing'")])
def test_unusable_environments_are_refused_at_the_start(pool, name, words):
    with pytest.raises(EnvironmentFailed, match=words):
        pool(name)


def call(name: str, **arguments: object) -> str:
    import json

    return f"thinking <tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def tools(*names: str) -> dict[str, object]:
    return {"tools": [f"environments.py:{name}" for name in names]}


def test_tools(pool):
    made = pool(**tools("multiply", "slow_echo", "breaks"))
    assert made.role == "tool" and not made.resets
    begin(made, *"abcdef")
    found = ask(
        made,
        a=call("multiply", a=6, b=7) + call("slow_echo", text="hi"),
        b=call("multiplie", a=1, b=2),
        c=call("multiply", a=1, c=2),
        d="<tool_call>{not json</tool_call>",
        e=call("breaks", text=""),
        f="the answer is 42",
    )
    messages = {episode: [m["content"] for m in reply.observation.turns()] for episode, reply in found.items()}
    assert messages["a"] == ["42", "hi"]
    assert "did you mean 'multiply'?" in messages["b"][0]
    assert "missing a required argument: 'b'" in messages["c"][0] or "unexpected keyword" in messages["c"][0]
    assert messages["d"][0].startswith("error: the call is not JSON")
    assert messages["e"] == ["error: ZeroDivisionError: no such quotient"]
    assert found["f"].observation.done and found["b"].observation.metrics == {"calls": 1.0, "call_errors": 1.0}


def test_a_tool_that_raises_is_a_failure_if_the_model_is_not_shown_errors(pool):
    made = pool(**tools("breaks", "never"), on_error="stop", timeout_s=0.5)
    begin(made, "a", "b")
    failure = ask(made, a=call("breaks", text="x"))["a"].failure
    assert failure.problem == "raised ZeroDivisionError: no such quotient" and "in breaks" in failure.traceback
    assert "did not answer within" in ask(made, b=call("never", text="x"))["b"].failure.problem
