"""HTTP rewards, against a real server that refuses, fails, hangs and sends invalid answers."""

import time
from email.utils import formatdate
from typing import Any

import pytest
from reward_samples import batch, prompt
from reward_server import Reply, free_port, serving

from lockstep.config.reward import HttpReward, RewardConfig
from lockstep.rewards import http_reward
from lockstep.rewards.http_reward import HttpTerm, backoff_s, retry_after_s
from lockstep.rewards.reward_terms import build_term, check_terms
from lockstep.rewards.reward_values import BadReward
from lockstep.rewards.scoring_messages import TermError, TermScores
from lockstep.watch.beacon.reader import read_beacons
from lockstep.watch.beacon.writer import close_beacon, open_beacon

KEY = "sk-test-0123456789abcdefghij"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short pauses between attempts; another test checks their length."""
    monkeypatch.setattr(http_reward, "_FIRST_BACKOFF_S", 0.01)


def term(url: str, **options: Any) -> HttpReward:
    return HttpReward.model_validate({"url": url, "timeout_s": 2.0, "deadline_s": 10.0, "retries": 2, **options})


def rows(count: int = 2) -> Any:
    prompts = [prompt(row, answer=f"a{row}", level=row) for row in range(count)]
    return batch(prompts, [["good", "bad"]] * count)


def score(url: str, made: Any = None, concurrency: int = 4, **options: Any) -> TermScores:
    advanced: list[int] = []
    scores = build_term(term(url, **options), "rm", concurrency=concurrency).score(made or rows(), advanced.append)
    assert sum(advanced) == len(made or rows())
    return scores


def failure(url: str, made: Any = None, **options: Any) -> BadReward:
    with pytest.raises(BadReward) as caught:
        HttpTerm(term(url, **options), "rm", 4).score(made or rows(), lambda _: None)
    assert url in caught.value.problem, "the endpoint is named"
    return caught.value


def lengths(number: int, body: dict[str, Any], path: str) -> Reply:
    return Reply([float(len(text)) for text in body["completions"]])


def test_scores_of_a_batch() -> None:
    with serving(lengths) as server:
        scores = score(f"{server.url}/score?model=x")
    assert scores.values == [4.0, 3.0, 4.0, 3.0]
    (sent,) = server.bodies
    assert sent == {
        "prompts": ["2+2="] * 4, "completions": ["good", "bad"] * 2, "level": [0, 0, 1, 1],
        "answer": ["a0", "a0", "a1", "a1"], "solution": ["a0", "a0", "a1", "a1"],
        "ground_truth": ["a0", "a0", "a1", "a1"], "label": ["a0", "a0", "a1", "a1"],
    }  # fmt: skip
    assert "authorization" not in server.headers[0] and server.headers[0]["content-type"] == "application/json"
    assert scores.extras["retries"] == [0.0] * 4 and all(0 < each < 2 for each in scores.extras["latency_s"])


def test_servers_of_openrlhf() -> None:
    """The format of `openrlhf.cli.serve_rm`, with the extra values of its custom rewards."""

    def reply(number: int, body: dict[str, Any], path: str) -> Reply:
        assert path == "/get_reward"
        count = len(body["query"])
        return Reply(
            {"rewards": [0.5] * count, "scores": [1] * count, "extra_logs": {"n": list(range(count)), "s": "x"}}
        )

    with serving(reply) as server:
        scores = score(f"{server.url}/get_reward", signature="openrlhf")
    assert server.bodies == [
        {"query": ["2+2=good", "2+2=bad"] * 2, "prompts": ["2+2="] * 4, "labels": ["a0", "a0", "a1", "a1"]}
    ]
    assert scores.values == [0.5] * 4 and scores.extras["scores"] == [1.0] * 4 and scores.extras["n"] == [0, 1, 2, 3]
    assert "s" not in scores.extras


def test_conversations_are_sent_as_messages_and_null_means_not_applicable() -> None:
    with serving(lambda *_: Reply([None])) as server:
        assert score(server.url, batch([prompt(messages=True)], [["ok"]])).values == [None]
    assert server.bodies[0]["prompts"] == [[{"role": "user", "content": "2+2="}]]
    assert server.bodies[0]["completions"] == [[{"role": "assistant", "content": "ok"}]]


def test_requests_are_split_joined_in_order_and_limited() -> None:
    def reply(number: int, body: dict[str, Any], path: str) -> Reply:
        return Reply([float(text) for text in body["completions"]], after_s=0.05 if number % 2 else 0.1)

    made = batch([prompt(row) for row in range(9)], [[str(10 * row), str(10 * row + 1)] for row in range(9)])
    with serving(reply) as server:
        scores = score(server.url, made, concurrency=3, batch_size=2)
        assert server.most == 3
    assert scores.values == [10.0 * row + index for row in range(9) for index in range(2)]
    assert len(server.bodies) == 9


@pytest.mark.parametrize("trouble", [Reply("busy", 500), Reply("", 503), Reply("slow down", 429), None])
def test_retryable_failures_are_retried(trouble: Reply | None) -> None:
    with serving(lambda number, body, path: trouble if number < 2 else lengths(number, body, path)) as server:
        scores = score(server.url)
    assert scores.values == [4.0, 3.0, 4.0, 3.0] and scores.extras["retries"] == [2.0] * 4
    assert len(server.bodies) == 3


def test_the_error_after_the_last_attempt_names_the_server_and_the_samples() -> None:
    with serving(lambda *_: Reply("out of\nmemory", 500)) as server:
        error = failure(server.url)
    assert "answered 500 Internal Server Error: out of memory (3 attempts)" in error.problem
    assert (error.position, error.count) == (0, 4) and len(server.bodies) == 3
    refused = failure(f"http://127.0.0.1:{free_port()}")
    assert "cannot be reached" in refused.problem and "(3 attempts)" in refused.problem
    assert "cannot be reached" in failure("http://no-such-host.invalid", retries=0).problem


def test_a_server_that_never_answers_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    began = time.monotonic()
    with serving(lambda *_: Reply([1.0], after_s=60)) as server:
        error = failure(server.url, timeout_s=0.2, retries=1)
    assert "did not answer within 0.2 s (2 attempts)" in error.problem
    assert time.monotonic() - began < 5


def test_a_server_that_answers_too_slowly_is_an_error() -> None:
    """Each byte arrives in time, but the whole answer does not."""
    began = time.monotonic()
    with serving(lambda *_: Reply([1.0] * 4, drip_s=0.1)) as server:
        assert "did not answer within 0.3 s" in failure(server.url, timeout_s=0.3, retries=0).problem
    assert time.monotonic() - began < 5


def test_the_deadline_limits_all_attempts() -> None:
    began = time.monotonic()
    with serving(lambda *_: Reply("", 429, {"Retry-After": "3600"})) as server:
        error = failure(server.url)
    assert "asks to wait 3600 s; deadline_s 10 allows no more" in error.problem
    assert time.monotonic() - began < 5


def test_retry_after_is_respected() -> None:
    with serving(lambda n, b, p: Reply("", 429, {"Retry-After": "1"}) if n == 0 else lengths(n, b, p)) as server:
        began = time.monotonic()
        score(server.url)
    assert 1.0 <= time.monotonic() - began < 5
    assert retry_after_s("7") == 7 and retry_after_s(None) == retry_after_s("soon") == retry_after_s("-3") == 0
    assert 50 < retry_after_s(formatdate(time.time() + 60, usegmt=True)) < 61
    assert retry_after_s(formatdate(time.time() - 60, usegmt=True)) == 0


def test_pauses_double_up_to_half_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_reward, "_FIRST_BACKOFF_S", 0.5)
    for number, longest in ((0, 0.5), (1, 1.0), (3, 4.0), (6, 30.0), (60, 30.0)):
        assert all(longest / 2 <= backoff_s(number) <= longest for _ in range(20))


@pytest.mark.parametrize(
    ("reply", "problem"),
    [
        (Reply("no such model", 404), "answered 404 Not Found: no such model"),
        (Reply({"detail": "bad key"}, 401), "the one that api_key_env names"),
        (Reply("<html>hello</html>"), "answered with something other than JSON: <html>hello</html>"),
        (Reply("[" * 200_000), "something other than JSON"),
        (Reply(""), "an empty body"),
        (Reply({"reward": [1.0] * 4}), "an object without 'rewards'"),
        (Reply("3.0"), "a float where a list of 4 numbers is expected"),
        (Reply([1.0, 2.0]), "returned 2 values for 4 samples"),
        (Reply(b"x" * (17 << 20)), "answered with more than 16 MiB"),
        (Reply("[]", headers={"content-encoding": "gzip"}), "a compressed body although the request excludes that"),
        (Reply("", 302, {"location": "http://elsewhere.invalid/x?token=abc"}), "a redirect to http://elsewhere.invalid/x,"),
        (Reply("", 302), "answered 302 Found"),
        (Reply("", 307, {"location": "http://[::1"}), "Invalid URL in location header"),
        (Reply("", 307, {"location": "/again"}), "redirects in a circle"),
        (Reply("", 307, {"location": "ftp://elsewhere.invalid/"}), "which is not followed"),
    ],
)  # fmt: skip
def test_an_invalid_answer_is_not_retried(reply: Reply, problem: str) -> None:
    with serving(lambda *_: reply) as server:
        error = failure(server.url)
    if "api_key_env" in problem:
        assert "answered 401 Unauthorized" in error.problem and "api_key_env" in error.problem
    else:
        assert problem in error.problem
    assert (error.position, error.count) == (0, 4) and len(server.bodies) <= 4


@pytest.mark.parametrize("bad", ["NaN", '"high"', "true, 1", "1e39", "null, 1"])
def test_an_invalid_value_names_its_sample(bad: str) -> None:
    def reply(number: int, body: dict[str, Any], path: str) -> Reply:
        return Reply(f"[0.5, {bad}]" if "," not in bad else f"[0.5, {bad}, 2]") if number == 1 else Reply([1.0, 1.0])

    with serving(reply) as server:
        made = HttpTerm(term(server.url, batch_size=2), "rm", 1)
        with pytest.raises(BadReward) as caught:
            made.score(rows(3), lambda _: None)
    assert server.url in caught.value.problem
    assert (caught.value.position, caught.value.count) == ((3, 1) if "," not in bad else (2, 2))


def test_a_redirect_within_the_server_is_followed() -> None:
    def reply(number: int, body: dict[str, Any], path: str) -> Reply:
        return lengths(number, body, path) if path == "/score/" else Reply("", 307, {"location": "/score/"})

    with serving(reply) as server:
        assert score(f"{server.url}/score", api_key_env=None).values == [4.0, 3.0, 4.0, 3.0]
    assert server.bodies[0] == server.bodies[1]


def test_a_key_is_sent_only_to_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RM_KEY", KEY)
    with serving(lambda *_: Reply(f"wrong key {KEY}", 403)) as server:
        error = failure(server.url, api_key_env="RM_KEY")
    assert server.headers[0]["authorization"] == f"Bearer {KEY}"
    assert KEY not in error.problem and "wrong key [hidden]" in error.problem


@pytest.mark.parametrize(
    ("value", "words"), [(None, "is not set"), ("", "is empty"), ("a\nb", "characters that are not allowed")]
)
def test_a_missing_key_is_refused_with_the_variable(
    monkeypatch: pytest.MonkeyPatch, value: str | None, words: str
) -> None:
    monkeypatch.delenv("RM_KEY", raising=False)
    environment = {} if value is None else {"RM_KEY": value}
    with pytest.raises(TermError, match=f"RM_KEY.*{words}"):
        check_terms([term("http://x.invalid", api_key_env="RM_KEY")], environment=environment)
    check_terms([term("http://x.invalid", api_key_env="RM_KEY")], environment={"RM_KEY": KEY})


def test_columns_that_are_not_json_are_an_error() -> None:
    with pytest.raises(BadReward) as error:
        HttpTerm(term("http://x.invalid"), "rm", 1).score(batch([prompt(x=b"1")], [["a"]]), id)
    assert "cannot be sent as JSON" in error.value.problem


def test_a_wait_names_the_server(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[Any] = []

    def reply(number: int, body: dict[str, Any], path: str) -> Reply:
        shown.extend(wait for state in read_beacons("waits") for wait in state.waits)
        return lengths(number, body, path)

    monkeypatch.setenv("LOCKSTEP_BEACONS", str(tmp_path))
    open_beacon("waits", "scorer-0", "reward", 0)
    try:
        with serving(reply) as server:
            score(f"{server.url}/score?key=abc")
    finally:
        close_beacon(remove=True)
    assert [(wait.kind, wait.waits_for, wait.why) for wait in shown] == [
        ("http", f"{server.url}/score", "rm of 4 samples, 0:0#0 to 0:1#1")
    ]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"url": "ftp://x"}, "not an http"),
        ({"url": "http://"}, "not an http"),
        ({"url": "http://host/a b"}, "not an http"),
        ({"url": "http://host:port/"}, "[Pp]ort"),
        ({"url": "http://host:70000/"}, "[Pp]ort"),
        ({"url": "http://me:pw@host/x"}, "contains a user name or password"),
        ({"api_key_env": "sk-123"}, "pattern"),
        ({"deadline_s": 1}, "leaves no time for one attempt"),
    ],
)
def test_impossible_settings_are_refused_in_the_config(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        HttpReward.model_validate({"url": "http://x", **change})


def test_fewer_requests_than_scorers_are_refused() -> None:
    with pytest.raises(ValueError, match=r"terms.0.concurrency 2 .* per worker .3."):
        RewardConfig.model_validate({"terms": [{"kind": "http", "url": "http://x", "concurrency": 2}], "workers": 3})
