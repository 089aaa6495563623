"""The scorer pool on real processes, with functions that raise, return wrong values, hang, crash and use much
memory."""

import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from reward_server import Reply, serving

from lockstep.config.reward import (
    ExactMatchReward,
    FunctionReward,
    HttpReward,
    LengthPenalty,
    MathReward,
    RegexReward,
    RewardConfig,
)
from lockstep.data.samples import Completion, Group, Prompt, Rollouts
from lockstep.rewards.scorer_pool import MAX_LOSSES_PER_SCORER, ScorerPool
from lockstep.rewards.scoring_messages import RewardError

HERE = Path(__file__).parent


@pytest.fixture
def pool(cluster):
    made = []

    def make(*terms, **options):
        terms = [FunctionReward(path=f"reward_faults.py:{term}") if isinstance(term, str) else term for term in terms]
        made.append(ScorerPool(cluster, RewardConfig(terms=tuple(terms), **options), HERE))
        return made[-1]

    yield make
    for each in made:
        each.close()


def rollouts(*texts, answer="ok", step=1, **columns):
    """Rollouts with a group for each list of completions."""
    columns = {"data_source": "test", **columns}
    groups = []
    for row, group in enumerate(texts):
        prompt = Prompt(f"0:{row}", row, np.arange(2, dtype=np.int32), "say ok: ", None, answer, columns)
        groups.append(Group(prompt, [completion(text) for text in group]))
    return Rollouts(step, step, groups)


def completion(text):
    count = max(1, len(text))
    tokens = np.arange(count, dtype=np.int32)
    return Completion("r", tokens, np.zeros(count, np.float32), np.zeros(count, np.int32), "stop", text)


GOOD = [["ok", "ok"], ["ok", "ok"]]
BAD = [["ok", "ok"], ["ok", "bad"]]


def failure(pool, texts=BAD, **columns):
    """The RewardError of scoring; checks that the rollouts are unchanged."""
    made = rollouts(*texts, **columns)
    with pytest.raises(RewardError) as caught:
        pool.score(made)
    assert all(group.rewards is None for group in made.groups)
    return caught.value


def blames(error, function, problem):
    """Check that the error names function and sample, and the problem."""
    assert error.function == f"reward_faults.py:{function}"
    assert (error.uid, error.row, error.completion) == ("0:1#1", 1, "bad")
    assert problem in error.problem
    assert all(part in str(error) for part in (function, "0:1#1", "row 1", problem))


def test_terms_weights_and_breakdown(pool):
    scorers = pool(
        ExactMatchReward(weight=2.0),
        MathReward(name="maths"),
        RegexReward(pattern=r"\d+"),
        LengthPenalty(soft=1, hard=3, weight=0.5),
        FunctionReward(path="reward_faults.py:where", name="mine", weight=0.0),
        workers=2,
        batch_size=3,
    )
    infos = scorers.start()
    assert [(info.name, info.per_sample) for info in infos[3:]] == [("length", True), ("mine", True)]
    done = scorers.score(rollouts(["4", "5"], ["4.0", "44"], ["400", "4"], answer="4"))
    assert done.rewards.dtype == np.float32
    assert done.rewards.tolist() == [[4.0, 1.0], [0.5, 0.75], [0.5, 4.0]]
    group = done.groups[1]
    assert set(group.breakdown) == {
        "exact_match", "maths", "maths/undecided", "regex", "length", "mine", "mine/pid", "mine/nice",
    }  # fmt: skip
    assert group.breakdown["maths"].tolist() == [1.0, 0.0]
    assert group.breakdown["length"].tolist() == [-1.0, -0.5]
    assert group.breakdown["mine"].tolist() == [4.0, 44.0]
    assert all(each.dtype == np.float32 for each in group.breakdown.values())
    assert (group.breakdown["mine/nice"] > os.nice(0)).all()
    again = scorers.score(done)  # nothing is left to score
    assert all(a is b for a, b in zip(again.groups, done.groups, strict=True))


def test_order_and_scoring_once(pool):
    scorers = pool("where", workers=2, batch_size=4)
    texts = [[str(10 * row + index) for index in range(3)] for row in range(20)]
    done = scorers.score(rollouts(*texts))
    assert done.rewards.tolist() == [[10 * row + index for index in range(3)] for row in range(20)]
    pids = {int(pid) for group in done.groups for pid in group.breakdown["where/pid"]}
    assert os.getpid() not in pids
    more = rollouts(["7", "8"])
    mixed = Rollouts(2, 2, [done.groups[0], more.groups[0], done.groups[1]])
    again = scorers.score(mixed)
    assert again.groups[0] is done.groups[0]
    assert again.groups[2] is done.groups[1]
    assert again.groups[1].rewards.tolist() == [7, 8]


def test_batch_functions_see_whole_groups(pool):
    scorers = pool("compares", batch_size=5)
    assert scorers.score(rollouts(*[["a", "b"]] * 3)).rewards.tolist() == [[4, 4], [4, 4], [2, 2]]


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        ("raises", "raised LookupError: no such key"),
        ("raises_in_a_batch", "raised KeyError: 'bad'"),
        ("nan", "returned NaN"),
        ("never", "no term applies"),
    ],
)
def test_an_invalid_reward_names_function_and_sample(pool, function, problem):
    error = failure(pool(function))
    if function == "never":
        assert (error.uid, error.row) == ("0:1#1", 1)
        assert problem in error.problem
        return
    blames(error, function, problem)
    if "raised" in problem:
        assert "reward_faults.py" in error.traceback
        assert function in error.traceback


def test_wrong_length(pool):
    error = failure(pool("short"))
    assert error.function == "reward_faults.py:short"
    assert "returned 3 values for 4 samples" in error.problem
    assert "0:0#0 to 0:1#1" in str(error)
    assert error.returned == "[1.0, 1.0, 1.0] (list)"


@pytest.mark.parametrize("function", ["hangs", "holds_the_interpreter", "hangs_in_a_batch"])
def test_a_function_that_never_returns(pool, function):
    scorers = pool(function, timeout_s=1.0)
    started = time.monotonic()
    error = failure(scorers)
    assert time.monotonic() - started < 30
    blames(error, function, "did not finish a sample for 1 s")
    assert "reward_faults.py" in error.traceback  # the stack it was in
    assert f"in {function}" in error.traceback
    assert scorers.score(rollouts(*GOOD)).rewards.tolist() == [[1, 1], [1, 1]]


@pytest.mark.parametrize(
    ("function", "how"),
    [("leaves", "exited with 1"), ("killed", "ended by signal 9"), ("crashes", "ended by signal 11")],
)
def test_a_scorer_that_dies(pool, function, how):
    scorers = pool(function)
    error = failure(scorers)
    blames(error, function, how)
    if function == "leaves":
        assert "about to leave" in error.traceback
    assert scorers.score(rollouts(*GOOD)).rewards.tolist() == [[1, 1], [1, 1]]


def test_memory_is_limited(pool):
    scorers = pool("hungry", memory_mb=4096)
    error = failure(scorers)
    blames(error, "hungry", "ran out of memory")
    assert "hungry" in error.traceback


def test_a_memory_limit_below_current_use_is_refused(pool):
    with pytest.raises(RewardError, match=r"memory_mb to at least \d+"):
        pool("hungry", memory_mb=8).start()


def test_a_death_that_does_not_repeat_costs_a_retry(pool, tmp_path):
    scorers = pool("leaves_once")
    made = scorers.score(rollouts(*BAD, extra_info={"marker": str(tmp_path / "died")}))
    assert (tmp_path / "died").exists()
    assert len(set(made.rewards.ravel().tolist())) == 1


def test_deaths_are_not_retried_forever(pool, tmp_path):
    texts = [[f"{row}", "ok"] for row in range(MAX_LOSSES_PER_SCORER + 1)]
    scorers = pool("leaves_once_per_sample", batch_size=2)
    error = failure(scorers, texts, extra_info={"marker": str(tmp_path)})
    assert "too many processes were lost" in error.problem
    assert len(list(tmp_path.iterdir())) == MAX_LOSSES_PER_SCORER + 1
    done = scorers.score(rollouts(*texts, extra_info={"marker": str(tmp_path)}))
    assert (done.rewards == 1).all()


def test_ctrl_c_ends_running_calls(pool):
    scorers = pool("slow_but_steady", workers=2)
    scorers.start()
    timer = threading.Timer(1.0, signal.raise_signal, [signal.SIGINT])
    timer.start()
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        scorers.score(rollouts(*[["a"] * 50] * 4))
    assert time.monotonic() - started < 10
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("scorer-")]
    assert scorers.score(rollouts(["a"])).rewards.tolist() == [[1.0]]


def test_a_batch_that_only_fails_as_a_whole_is_reported_as_such(pool):
    error = failure(pool("too_slow_together", timeout_s=1.0))
    assert error.function == "reward_faults.py:too_slow_together"
    assert error.uid is None
    assert "each of them succeeds on its own" in error.problem
    assert "lower reward.batch_size" in error.problem


def test_a_slow_function_that_finishes_samples_is_not_ended(pool):
    scorers = pool("slow_but_steady", timeout_s=1.0)
    done = scorers.score(rollouts(["a"] * 10))
    assert done.rewards.tolist() == [[1.0] * 10]


def test_one_failure_ends_the_others_calls_at_once(pool):
    scorers = pool("raises", "slow_but_steady", workers=2, batch_size=64)
    started = time.monotonic()
    error = failure(scorers, [["bad"], ["ok"] * 40])
    assert error.uid == "0:0#0"
    assert time.monotonic() - started < 15  # the other term alone takes 20 s
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("scorer-")]


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("reward_faults.py:hang", "did you mean 'hangs'"),
        ("no_such_file.py:f", "there is no file"),
        ("os:getcwd", "fit none of the known signatures"),
    ],
)
def test_functions_that_cannot_be_used_are_refused_before_the_first_rollout(pool, path, problem):
    with pytest.raises(RewardError, match=problem) as caught:
        pool(FunctionReward(path=path)).start()
    assert caught.value.function == path


def test_an_import_that_crashes(pool, tmp_path):
    (tmp_path / "crash.py").write_text("import os\nprint('importing')\nos._exit(3)\n")
    with pytest.raises(RewardError, match="exited with 3 while loading") as caught:
        pool(FunctionReward(path=f"{tmp_path}/crash.py:f")).start()
    assert "importing" in caught.value.traceback


def test_a_server_has_its_own_deadline_and_its_requests_are_distributed(pool):
    """The server is slower than `timeout_s`, which applies to functions only; the error names endpoint and samples."""

    def reply(number, body, path):
        bad = "bad" in body["completions"]
        return Reply("cannot", 400) if bad else Reply([float(len(body["completions"]))] * 2, after_s=1.5)

    with serving(reply) as server:
        term = HttpReward(url=f"{server.url}/rm", batch_size=2, concurrency=3, timeout_s=20, deadline_s=20)
        scorers = pool(term, timeout_s=0.5, workers=2, batch_size=8)
        assert scorers.score(rollouts(*[["a", "b"]] * 8)).rewards.tolist() == [[2.0, 2.0]] * 8
        assert server.most == 3
        error = failure(scorers)
    assert (error.function, error.uid) == ("http", None)
    assert f"{server.url}/rm answered 400 Bad Request: cannot (2 samples, 0:1#0 to 0:1#1)" in error.problem


def test_closing_leaves_no_process(pool):
    scorers = pool("where", workers=2)
    done = scorers.score(rollouts(*[["1"]] * 30))
    pids = {int(pid) for group in done.groups for pid in group.breakdown["where/pid"]}
    scorers.close()
    scorers.close()
    assert not [pid for pid in pids if psutil.pid_exists(pid)]
