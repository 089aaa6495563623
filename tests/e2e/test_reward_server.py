"""`lockstep serve-reward` gives the scores of transformers in the forms of OpenRLHF and vLLM, to those with the token,
also under load, and stops at Ctrl-C."""

import asyncio
import re
import secrets
import signal
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from served_rewards import Server, make_reward_model, reference_scores, rows, serving
from transformers import AutoTokenizer
from typer.testing import CliRunner

from lockstep.base.folders import write_private
from lockstep.base.transport.run_token import estimated_bits
from lockstep.cli import app
from lockstep.config.reward import ModelReward
from lockstep.rewards.reward_terms import build_term
from lockstep.rewards.reward_values import BadReward

pytestmark = [pytest.mark.xdist_group("reward-server"), pytest.mark.timeout(200)]

TOKEN = secrets.token_hex(32)
TOKEN_OF_RUNS = secrets.token_hex(32)
TEXTS = ["12=12", "7=", "90=09<eos>", "0123456789=0"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape: dict[str, Any] = {"hidden": 32, "layers": 2, "heads": 2, "kv_heads": 1, "ffn": 64, "max_length": 32}
    return make_reward_model(tmp_path_factory.mktemp("served"), **shape, alphabet="0123456789=", seed=4)


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    home = tmp_path_factory.mktemp("home")
    (home / ".lockstep").mkdir(mode=0o700)
    write_private(home / ".lockstep" / "token", f"{TOKEN_OF_RUNS}\n".encode())
    with serving(model, home) as server:
        until = time.monotonic() + 30
        while time.monotonic() < until:
            try:
                httpx.get(f"{server.url}/health", timeout=5)
                break
            except httpx.TransportError:
                time.sleep(0.1)
        yield server


def expected(model: Path, texts: list[str]) -> list[float]:
    tokenizer = AutoTokenizer.from_pretrained(model)
    return reference_scores(model, [tokenizer(text)["input_ids"][-31:] for text in texts])


def test_scores_are_those_of_transformers_in_every_form(server: Server, model: Path) -> None:
    ended = expected(model, [text if text.endswith("<eos>") else f"{text}<eos>" for text in TEXTS])
    answer = server.post("/get_reward", {"query": TEXTS, "prompts": TEXTS, "labels": [None] * 4}).json()
    assert answer["rewards"] == answer["scores"] == pytest.approx(ended, abs=1e-5)
    plain = expected(model, TEXTS)
    body = {"model": "any", "input": TEXTS, "use_activation": False}
    answer = server.post("/classify", body).json()
    assert [each["probs"] for each in answer["data"]] == [[pytest.approx(score, abs=1e-5)] for score in plain]
    assert answer["usage"]["prompt_tokens"] == 5 + 2 + 6 + 12
    for path, field in (("classify", "probs"), ("pooling", "data")):
        (one,) = server.post(f"/{path}", {"input": TEXTS[0]}).json()["data"]
        assert one[field] == pytest.approx([torch.tensor(plain[0]).sigmoid().item()], abs=1e-5)
    answer = server.post("/pooling", body).json()
    assert [each["data"] for each in answer["data"]] == [[pytest.approx(score, abs=1e-5)] for score in plain]
    long = "0123456789" * 5 + "="
    tokens = AutoTokenizer.from_pretrained(model)(long)["input_ids"]
    for options, kept in (
        ({}, tokens[-31:]),
        ({"truncate_prompt_tokens": -1, "truncation_side": "left"}, tokens[-31:]),
        ({"truncate_prompt_tokens": 9}, tokens[-9:]),
        ({"truncate_prompt_tokens": 9, "truncation_side": "right"}, tokens[:9]),
        ({"truncate_prompt_tokens": 10**9, "truncation_side": "right"}, tokens[:31]),
    ):
        (one,) = server.post("/pooling", {"input": long, "use_activation": False, **options}).json()["data"]
        assert one["data"] == pytest.approx(reference_scores(model, [kept]), abs=1e-5), options


def test_without_the_token_only_the_health_is_shown(server: Server) -> None:
    assert httpx.get(f"{server.url}/health").json() == {"status": "ok"}
    body = {"query": ["1"], "input": ["1"]}
    for headers in ({}, {"authorization": f"Bearer {server.token[:-1]}"}, {"authorization": "Bearer"}):
        for path in ("/get_reward", "/classify", "/pooling"):
            refused = httpx.post(f"{server.url}{path}", json=body, headers=headers)
            assert refused.status_code == 401 and "rewards" not in refused.text and "data" not in refused.text
    assert httpx.get(f"{server.url}/metrics").status_code == 401
    assert httpx.get(f"{server.url}/docs").status_code == 404
    assert int(server.metrics()['lockstep_reward_requests_total{path="/classify",status="401"}']) >= 3
    assert server.token not in server.log.read_text()


def test_the_token_of_runs_is_neither_needed_nor_accepted(server: Server) -> None:
    """Clients send the server's token unencrypted; whoever has that of runs can run commands."""
    folder = server.log.parent / ".lockstep"
    assert server.token != TOKEN_OF_RUNS and estimated_bits(server.token) > 200
    assert stat.S_IMODE((folder / "reward_token").stat().st_mode) == 0o600
    assert sorted(each.name for each in folder.iterdir()) == ["reward_token", "token"]
    headers = {"authorization": f"Bearer {TOKEN_OF_RUNS}"}
    assert httpx.post(f"{server.url}/pooling", json={"input": ["1"]}, headers=headers).status_code == 401
    log = server.log.read_text()
    assert str(folder / "reward_token") in log and TOKEN_OF_RUNS not in log


@pytest.mark.parametrize(
    ("content", "status", "said"),
    [
        (b"{", 400, "not valid JSON"),
        (b"[1]", 400, "not a JSON object"),
        (b'{"query": []}', 400, "query: expected a list of texts"),
        (b'{"query": [1]}', 400, "query: expected a list of texts"),
        (b'{"query": ' + b'["1"' + b',"1"' * 2048 + b"]}", 413, "has 2,?049 texts: send 2,?048 texts at most"),
        (b'{"query": ["' + b"1" * (16 << 20) + b'"]}', 413, "is the limit: send fewer texts"),
        (b"\x80\x04\x95", 400, "not valid JSON"),
        (b'{"query": ["1", "\\ud800"]}', 400, "query: text 1 is not Unicode"),
        (b'{"query": ["1"], "truncate_prompt_tokens": 0}', 400, "truncate_prompt_tokens: expected a number"),
        (b'{"query": ["1"], "truncation_side": "both"}', 400, "truncation_side: expected left or right"),
    ],
    ids=["cut", "list", "empty", "number", "many", "large", "pickle", "surrogate", "no tokens", "both sides"],
)
def test_what_is_no_request_is_refused(server: Server, content: bytes, status: int, said: str) -> None:
    answer = httpx.post(f"{server.url}/get_reward", content=content, headers=server.headers, timeout=30)
    assert answer.status_code == status and re.search(said, answer.json()["error"]), answer.text


def test_many_clients_at_once_get_their_own_scores_or_are_asked_to_wait(model: Path, tmp_path: Path) -> None:
    """Eight texts may wait: of 96 requests at once some are refused, and all are answered when they try again."""
    texts = [f"{number:04d}=" for number in range(96)]
    wanted = dict(zip(texts, expected(model, texts), strict=True))

    async def ask(client: httpx.AsyncClient, url: str, text: str) -> int:
        refused = 0
        while True:
            answer = await client.post(f"{url}/pooling", json={"input": [text], "use_activation": False})
            if answer.status_code == 200:
                assert answer.json()["data"][0]["data"] == pytest.approx([wanted[text]], abs=1e-5)
                return refused
            assert answer.status_code == 429 and int(answer.headers["retry-after"]) >= 1, answer.text
            refused += 1
            await asyncio.sleep(0.05)

    async def ask_all(url: str) -> list[int]:
        headers = {"authorization": f"Bearer {TOKEN}"}
        limits = httpx.Limits(max_connections=48)
        async with httpx.AsyncClient(headers=headers, timeout=60, limits=limits) as client:
            return await asyncio.gather(*(ask(client, url, text) for text in texts))

    with serving(model, tmp_path, "--max-waiting", "8", given=f"{TOKEN}\n") as server:
        refused = asyncio.run(ask_all(server.url))
        metrics = server.metrics()
        assert int(metrics["lockstep_reward_texts_total"]) == 96
        assert int(metrics["lockstep_reward_refused_total"]) == sum(refused) > 0
        assert int(metrics["lockstep_reward_batches_total"]) < 96, "requests are scored together"
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(20) == 0
        assert "Traceback" not in server.log.read_text()


def test_a_model_without_a_score_head_is_refused(model: Path) -> None:
    done = CliRunner().invoke(app, ["serve-reward", str(model.parent / "lm"), "--no-token"])
    assert done.exit_code == 2 and "no head that gives a score" in " ".join(done.stderr.split())


@pytest.mark.parametrize("path", ["get_reward", "classify", "pooling"])
def test_terms_with_its_address_get_the_scores_of_transformers(
    server: Server, model: Path, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of texts as the policy writes them, and of conversations in the reward model's own template; normalised too."""
    monkeypatch.setenv("RM_KEY", server.token)
    address: dict[str, Any] = {"url": f"{server.url}/{path}", "api_key_env": "RM_KEY", "batch_size": 3}
    eos = "<eos>" if path == "get_reward" else ""
    found = build_term(ModelReward(**address), "rm", concurrency=2).score(rows(["1", "22"]), lambda _: None)
    texts = [f"{start}{end}{eos}" for start in ("12=", "90=") for end in ("1", "22")]
    assert found.values == pytest.approx(expected(model, texts), abs=1e-5)
    assert found.extras["retries"] == [0.0] * 4
    template = model.parent / "template.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}")
    settings = {"path": str(model), "chat_template": str(template), "normalize": {"mean": 0.5, "std": 2.0}}
    found = build_term(ModelReward(**address, **settings), "rm").score(rows(["1", "22"], chat=True), lambda _: None)
    texts = [f"{start}<eos>{end}<eos>" for start in ("12=", "90=") for end in ("1", "22")]
    raw = expected(model, texts)
    assert found.extras["score"] == pytest.approx(raw, abs=1e-5)
    assert found.values == pytest.approx([(score - 0.5) / 2.0 for score in raw], abs=1e-5)


def test_a_wrong_token_is_named(server: Server) -> None:
    found = build_term(ModelReward(url=f"{server.url}/pooling"), "rm")
    with pytest.raises(BadReward, match=r"answered 401 .*api_key_env"):
        found.score(rows(["1"]), lambda _: None)
