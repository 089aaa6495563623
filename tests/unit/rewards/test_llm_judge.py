"""A judge, against a real server with OpenAI's chat completions and with invalid answers."""

from pathlib import Path
from typing import Any

import pytest
from reward_samples import batch, prompt
from reward_server import Reply, chat, free_port, serving

from lockstep.config.reward import JudgeReward
from lockstep.rewards import http_reward
from lockstep.rewards.llm_judge import JudgeTerm
from lockstep.rewards.reward_terms import check_terms
from lockstep.rewards.reward_values import BadReward
from lockstep.rewards.scoring_messages import TermError, TermScores

KEY = "sk-test-0123456789abcdefghij"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_reward, "_FIRST_BACKOFF_S", 0.01)
    monkeypatch.setenv("JUDGE_KEY", KEY)


def term(url: str = "http://x.invalid", **options: Any) -> JudgeReward:
    quick = {"timeout_s": 2.0, "deadline_s": 10.0, "retries": 2, "model": "m", "api_key_env": "JUDGE_KEY"}
    return JudgeReward.model_validate({"base_url": f"{url}/v1", **quick, **options})


ROWS = [prompt(0, answer="4"), prompt(1, text="3+3=")]
TEXTS = [["4", "5"], ["6", "7"]]


def score(judge: JudgeTerm, texts: list[list[str]] = TEXTS, step: int = 0) -> TermScores:
    advanced: list[int] = []
    scores = judge.score(batch(ROWS, texts, step), advanced.append)
    assert sum(advanced) == sum(map(len, texts))
    return scores


def failure(url: str, texts: list[list[str]] = TEXTS, **options: Any) -> BadReward:
    with pytest.raises(BadReward) as caught:
        JudgeTerm(term(url, **options), "judge", 1).score(batch(ROWS, texts), lambda _: None)
    assert f"{url}/v1/chat/completions" in caught.value.problem, "the endpoint is named"
    return caught.value


def grade(number: int, body: dict[str, Any], path: str) -> Reply:
    """Scores 10 for the answers 4 and 6, else 3, in a text that contains other numbers."""
    question = body["messages"][-1]["content"]
    right = any(f"[Response]\n{good}\n" in question for good in ("4", "6"))
    return Reply(chat(f"Score: 1 would be harsh, 2 steps are missing.\n**Score:** {10 if right else 3}"))


def test_completions_are_graded_in_order() -> None:
    with serving(grade) as server:
        scores = score(JudgeTerm(term(server.url, system="You grade."), "judge", 4))
    assert scores.values == [1.0, 0.3, 1.0, 0.3]
    assert scores.extras["cached"] == scores.extras["unreadable"] == [0.0] * 4
    assert scores.extras["retries"] == [0.0] * 4
    sent = sorted(server.bodies, key=lambda body: body["messages"][1]["content"])
    assert [each["messages"][0] for each in sent] == [{"role": "system", "content": "You grade."}] * 4
    questions = [each["messages"][1]["content"] for each in sent]
    assert sum("[Reference answer]\n4\n" in each for each in questions) == 2, "only where the row has an answer"
    assert all("2+2=" in each or "3+3=" in each for each in questions)
    assert {"model": "m", "temperature": 0.0, "max_tokens": 512}.items() <= sent[0].items()
    assert server.headers[0]["authorization"] == f"Bearer {KEY}"


def test_the_request_follows_the_config() -> None:
    extra = {"max_completion_tokens": 9, "response_format": {"type": "json_object"}}
    options = {"temperature": None, "max_tokens": None, "extra": extra, "api_key_env": None}
    own = "{{ messages[0].content }}|{{ completion }}|{{ columns.level }}|{{ answer }}"
    with serving(lambda *_: Reply(chat("score 10"))) as server:
        judge = JudgeTerm(term(server.url, template=own, **options), "judge", 1)
        made = batch([prompt(0, answer="4", messages=True, level=2)], [["x{{ 1 }}"]])
        assert judge.score(made, lambda _: None).values == [1.0]
    message = {"role": "user", "content": "2+2=|x{{ 1 }}|2|4"}
    assert server.bodies == [{"model": "m", "messages": [message], **extra}]
    assert "authorization" not in server.headers[0]


def test_equal_questions_of_a_step_are_asked_once() -> None:
    with serving(grade) as server:
        judge = JudgeTerm(term(server.url), "judge", 4)
        first = score(judge, [["4", "4"], ["5", "6"]])
        assert first.values == [1.0, 1.0, 0.3, 1.0] and first.extras["cached"] == [0.0, 1.0, 0.0, 0.0]
        assert len(server.bodies) == 3
        assert first.extras["latency_s"][1] is None and first.extras["latency_s"][0] is not None
        again = score(judge, [["4", "9"], ["5", "6"]])
        assert again.extras["cached"] == [1.0, 0.0, 1.0, 1.0] and len(server.bodies) == 4
        score(judge, [["4", "4"], ["5", "6"]], step=1)
        assert len(server.bodies) == 7
        score(JudgeTerm(term(server.url, cache=False), "judge", 4), [["4", "4"], ["5", "5"]])
        assert len(server.bodies) == 11


@pytest.mark.parametrize(
    ("said", "options", "value"),
    [
        ("Score: 7", {}, 0.7),
        ("Score = 3, no: score: 8.5", {}, 0.85),
        ("<think>Score: 2</think>\nScore: **4**", {}, 0.4),
        ("rating -1", {"pattern": "rating (-?[0-9]+)", "lowest": -1, "highest": 1}, 0.0),
        ('{"grade": {"total": 4}}', {"json_key": "grade.total", "highest": 5}, 0.8),
        ('Well {x}. ```json\n{"s": "2.5"}\n``` so {it} is', {"json_key": "s", "highest": 5}, 0.5),
        ('first {"s": 1} then {"s": 5} end', {"json_key": "s", "highest": 5}, 1.0),
    ],
)
def test_how_a_score_is_read(said: str, options: dict[str, Any], value: float) -> None:
    judge = JudgeTerm(term(**options), "judge", 1)
    with serving(lambda *_: Reply(chat(said))) as server:
        judge = JudgeTerm(term(server.url, **options), "judge", 1)
        assert score(judge, [["a"], ["b"]]).values == pytest.approx([value, value])


UNREADABLE = [
    (Reply(chat("I like it")), "an answer without a score: 'I like it'"),
    (Reply(chat("Score: 11")), "gave the score 11, which is not within 0 and 10"),
    (Reply(chat(None)), "gave an empty answer"),
    (Reply(chat("", finish_reason="length")), "max_tokens is too small"),
    (Reply("<html>gateway</html>"), "other than a chat completion: <html>gateway</html>"),
    (Reply({"choices": []}), "other than a chat completion"),
    (Reply({"error": {"message": "overloaded"}}), "overloaded"),
]


@pytest.mark.parametrize(("reply", "problem"), UNREADABLE)
def test_an_unreadable_answer_is_retried_and_never_a_silent_zero(reply: Reply, problem: str) -> None:
    with serving(lambda n, b, p: reply if n < 2 else grade(n, b, p)) as server:
        scores = score(JudgeTerm(term(server.url), "judge", 1), [["4"], []])
        assert scores.values == [1.0] and scores.extras["retries"] == [2.0]
    with serving(lambda *_: reply) as server:
        error = failure(server.url, [["4"], ["6"]])
        assert problem in error.problem and "(3 attempts)" in error.problem and error.position in (0, 1)
    with serving(lambda *_: reply) as server:
        scores = score(JudgeTerm(term(server.url, unreadable=0.25), "judge", 1), [["4"], ["6"]])
        assert scores.values == [0.25, 0.25] and scores.extras["unreadable"] == [1.0, 1.0]
        assert len(server.bodies) == 6


def test_a_failing_server() -> None:
    replies = [Reply("", 500), Reply("", 429, {"Retry-After": "0"})]
    with serving(lambda n, b, p: replies[n] if n < 2 else grade(n, b, p)) as server:
        assert score(JudgeTerm(term(server.url), "judge", 1), [["4"], []]).values == [1.0]
    with serving(lambda *_: Reply(chat("Score: 1"), after_s=60)) as server:
        error = failure(server.url, timeout_s=0.2, retries=1, unreadable=0.0)
        assert "did not answer within 0.2 s (2 attempts)" in error.problem, "`unreadable` applies only to answers"
    assert "cannot be reached" in failure(f"http://127.0.0.1:{free_port()}").problem
    with serving(lambda *_: Reply({"error": {"message": f"Incorrect API key provided: {KEY}"}}, 401)) as server:
        error = failure(server.url)
        assert KEY not in error.problem and "api_key_env" in error.problem and len(server.bodies) == 1


def test_the_sample_whose_question_failed_is_named() -> None:
    def reply(number: int, body: dict[str, Any], path: str) -> Reply:
        bad = "[Response]\nbad\n" in body["messages"][-1]["content"]
        return Reply({"error": "content policy"}, 400) if bad else grade(number, body, path)

    with serving(reply) as server:
        error = failure(server.url, [["4", "5"], ["6", "bad"]])
    assert error.position == 3 and "400 Bad Request" in error.problem and "content policy" in error.problem


def test_a_template_with_a_missing_column_is_an_error() -> None:
    judge = JudgeTerm(term(template="{{ answer }} {{ completion }}"), "judge", 1)
    with pytest.raises(BadReward, match="'answer' is undefined") as caught:
        judge.score(batch(ROWS, TEXTS), lambda _: None)
    assert caught.value.position == 2


def test_a_template_runs_in_a_sandbox() -> None:
    for template in (
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{% for x in range(10**9) %}{% endfor %}",
    ):
        judge = JudgeTerm(term(template=template), "judge", 1)
        with pytest.raises(BadReward, match="cannot be filled in"):
            judge.score(batch(ROWS, TEXTS), lambda _: None)


def test_a_judge_without_its_key_is_refused_before_anything_starts() -> None:
    with pytest.raises(TermError, match=r"reward judge: the environment variable OPENAI_API_KEY.*is not set.*null"):
        check_terms([JudgeReward(model="m")], environment={})
    check_terms([JudgeReward(model="m", api_key_env=None)], Path(), {})
    check_terms([JudgeReward(model="m")], environment={"OPENAI_API_KEY": KEY})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"template": "{{ prompt"}, "line 1 of the template"),
        ({"template": "{{ question }}"}, "the template uses question; available: answer, columns"),
        ({"pattern": "("}, "not a regular expression"),
        ({"lowest": 10}, "must be less than highest"),
        ({"base_url": "api.openai.com"}, "not an http"),
    ],
)
def test_impossible_settings_are_refused_in_the_config(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        JudgeReward.model_validate({"model": "m", **change})
