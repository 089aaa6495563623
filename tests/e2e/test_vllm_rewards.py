"""Rewards from a real vLLM server are those of transformers, and `lockstep serve-reward` answers as it does."""

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch
from forked_controller import ENVIRONMENT
from harness import ALPHABET, Launched, config, task, write
from served_rewards import make_reward_model, reference_scores, rows, serving
from transformers import AutoTokenizer

from lockstep.base.network import listen
from lockstep.config.reward import ModelReward
from lockstep.rewards.model_server import FIELDS_OF_VLLM
from lockstep.rewards.reward_terms import build_term
from lockstep.rewards.reward_values import BadReward

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("vllm") is None, reason="needs the extra `vllm`: script/test --vllm"),
    pytest.mark.timeout(900),
]

START_S = 500.0
"""vLLM's server is ready after 90 s on two quiet cores, and was after 280 s on busy ones."""
KEY_VARIABLE = "LOCKSTEP_TEST_API_KEY"
KEY = ENVIRONMENT[KEY_VARIABLE]
CONTEXT = 64
TEXTS = ["12=12", "7", "90=09<eos>", "0123456789" * 5 + "=3<eos>", "=", "31415926535897932384="]
FORMS = [("classify", "probs"), ("pooling", "data")]


def near(scores: list[float]) -> Any:
    """All compute in float32, in different orders: scores of about one differ by some 1e-6."""
    return pytest.approx(scores, abs=1e-5)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its tokenizer adds a beginning-of-sequence token, which its chat template does not write."""
    shape: dict[str, Any] = {"hidden": 128, "layers": 2, "heads": 4, "kv_heads": 2, "ffn": 64, "family": "llama"}
    home = tmp_path_factory.mktemp("served")
    return make_reward_model(home, **shape, max_length=CONTEXT, alphabet=ALPHABET, bos=True, chat=True, seed=4)


def reserved_port() -> int:
    """A free port that the kernel gives to nobody while vLLM starts, which binds it at the end."""
    with listen("127.0.0.1", (random.randrange(20000, 30000), 32000)) as probe:
        return int(probe.getsockname()[1])


class VllmServer:
    """A pooling server of vLLM."""

    def __init__(self, model: Path, log: Path) -> None:
        port = reserved_port()
        self.url, self._log = f"http://127.0.0.1:{port}", log
        command = [
            sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--served-model-name",
            "rm", "--runner", "pooling", "--dtype", "float32", "--max-model-len", str(CONTEXT), "--enforce-eager",
            "--host", "127.0.0.1", "--port", str(port),
        ]  # fmt: skip
        environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_API_KEY": KEY}
        with log.open("w") as output:
            self._process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)

    def wait_until_ready(self) -> None:
        until = time.monotonic() + START_S
        while time.monotonic() < until and self._process.poll() is None:
            try:
                if httpx.get(f"{self.url}/health", timeout=5).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.5)
        raise AssertionError(f"vLLM's server is not ready:\n{self._log.read_text()[-4000:]}")

    def kill(self) -> None:
        """Ends the server and its workers."""
        if self._process.poll() is not None:
            return
        members = psutil.Process(self._process.pid).children(recursive=True)
        self._process.kill()
        self._process.wait(30)
        for member in members:
            try:
                member.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(members, 30)


@pytest.fixture(scope="module")
def vllm(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    server = VllmServer(model, tmp_path_factory.mktemp("vllm") / "server.log")
    try:
        server.wait_until_ready()
        yield server
    finally:
        server.kill()


@contextmanager
def own_server(model: Path, home: Path) -> Iterator[str]:
    with serving(model, home, given=KEY) as server:
        yield server.url


@pytest.fixture(scope="module")
def lockstep(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with own_server(model, tmp_path_factory.mktemp("home")) as url:
        yield url


def post(url: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = httpx.post(f"{url}/{path}", json=body, headers={"authorization": f"Bearer {KEY}"}, timeout=60)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def encode(model: Path, texts: list[str], special: bool = True) -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(model)
    return [tokenizer(text, add_special_tokens=special)["input_ids"] for text in texts]


@pytest.mark.parametrize(("path", "field"), FORMS)
def test_both_servers_answer_alike(vllm: VllmServer, lockstep: str, model: Path, path: str, field: str) -> None:
    """Texts of unequal lengths in one request; the fields of it that change scores."""
    bare, whole = encode(model, TEXTS, special=False), encode(model, TEXTS)
    raw: dict[str, Any] = {"use_activation": False}
    short = {**raw, "add_special_tokens": False, "truncate_prompt_tokens": 9}
    cases: list[tuple[dict[str, Any], list[list[int]], bool]] = [
        ({}, whole, True),
        ({"use_activation": None}, whole, True),
        ({"use_activation": True}, whole, True),
        (raw, whole, False),
        ({**raw, "add_special_tokens": False}, bare, False),
        (FIELDS_OF_VLLM, whole, False),
        ({**short, "truncation_side": "left"}, [tokens[-9:] for tokens in bare], False),
        ({**short, "truncation_side": "right"}, [tokens[:9] for tokens in bare], False),
    ]
    for fields, tokens, activated in cases:
        scores = torch.tensor(reference_scores(model, tokens))
        wanted = (scores.sigmoid() if activated else scores).tolist()
        for url in (vllm.url, lockstep):
            found = post(url, path, {"model": "rm", "input": TEXTS, **fields})
            assert [row["index"] for row in found["data"]] == list(range(len(TEXTS)))
            assert [row[field] for row in found["data"]] == [near([score]) for score in wanted], (url, fields)
            assert found["usage"]["prompt_tokens"] == sum(map(len, tokens)), (url, fields)
            (one,) = post(url, path, {"model": "rm", "input": TEXTS[3], **fields})["data"]
            assert one.keys() == found["data"][0].keys() and one[field] == near([wanted[3]]), (url, fields)


@pytest.mark.parametrize(("path", "field"), FORMS)
def test_long_texts_keep_their_end(vllm: VllmServer, lockstep: str, model: Path, path: str, field: str) -> None:
    """`lockstep serve-reward` keeps the beginning-of-sequence token too, and one token less than the context."""
    (tokens,) = encode(model, ["0123456789" * 8 + "=7<eos>"])
    assert len(tokens) > CONTEXT + 10
    kept = {vllm.url: tokens[-CONTEXT:], lockstep: [*tokens[:1], *tokens[-CONTEXT + 2 :]]}
    for url, cut in kept.items():
        body = {"model": "rm", "input": ["0123456789" * 8 + "=7<eos>"], **FIELDS_OF_VLLM}
        assert post(url, path, body)["data"][0][field] == near(reference_scores(model, [cut])), url


@pytest.mark.parametrize("path", ["classify", "pooling", "get_reward"])
def test_terms_get_the_scores_of_transformers(
    vllm: VllmServer, lockstep: str, model: Path, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of plain texts and of conversations, with the reward model's tokenizer and without it, in requests of three."""
    monkeypatch.setenv("RM_KEY", KEY)
    tokenizer = AutoTokenizer.from_pretrained(model)
    ends = ["1", "2345678901234567890", "", "99"]
    texts = [f"{start}{end}" for start in ("12=", "90=") for end in ends]
    chats = [
        [{"role": "user", "content": start}, {"role": "assistant", "content": end}]
        for start in ("12=", "90=")
        for end in ends
    ]
    ended = [f"{text}<eos>" for text in texts]
    wanted = {
        (False, False): encode(model, ended if path == "get_reward" else texts),
        (False, True): encode(model, ended),
        (True, False): encode(model, ended if path == "get_reward" else texts, special=False),
        (True, True): [tokenizer.apply_chat_template(each, return_dict=False) for each in chats],
    }
    for url in [lockstep] if path == "get_reward" else [vllm.url, lockstep]:
        for (chat, own_tokenizer), tokens in wanted.items():
            term = ModelReward(
                url=f"{url}/{path}",
                path=str(model) if own_tokenizer else None,
                served_model_name=None if path == "get_reward" else "rm",
                api_key_env="RM_KEY",
                batch_size=3,
            )
            found = build_term(term, "rm", concurrency=2).score(rows(ends, chat), lambda _: None)
            assert found.values == near(reference_scores(model, tokens)), (url, chat, own_tokenizer)


def test_what_vllm_refuses_is_named(vllm: VllmServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RM_KEY", KEY)
    term = build_term(ModelReward(url=f"{vllm.url}/classify", served_model_name="other", api_key_env="RM_KEY"), "rm")
    with pytest.raises(BadReward, match=r"classify answered 404 .*model `other` does not exist"):
        term.score(rows(["1"]), lambda _: None)


def test_a_run_names_a_server_that_ends_and_resumes_with_another(vllm: VllmServer, model: Path, tmp_path: Path) -> None:
    """The last test of this module: vLLM's server is killed between two steps of the run."""
    folder = task(tmp_path)
    term = {"kind": "model", "name": "rm", "url": f"{vllm.url}/classify", "path": str(model), "batch_size": 4}
    term |= {"served_model_name": "rm", "api_key_env": KEY_VARIABLE, "timeout_s": 60, "deadline_s": 60, "retries": 0}
    values = config(folder, "grpo", name="remote", steps=30, evaluation=None, reward={"terms": [term]})
    values["checkpoint"] = {"every": 0, "export": False}
    values["trainer"]["ranks"] = 1
    run = Path(values["folder"]) / "remote"
    launched = Launched.start(run, str(write(folder, values)))
    launched.wait_until(lambda: steps_done(run) >= 2 or None, "did two steps", near=lambda: False)
    vllm.kill()
    assert launched.finish() == 1, launched.text()
    printed = " ".join(launched.printed().split())
    assert f"error reward model: {vllm.url}/classify" in printed and f"--resume {run}" in printed
    assert launched.has_ended(10)
    assert 2 <= steps_done(run) < 30
    with own_server(model, tmp_path) as url:
        launched = Launched.resume(run, f"reward.terms.0.url={url}/classify")
        assert launched.finish() == 0, launched.text()
    assert steps_done(run) == 30


def steps_done(run: Path) -> int:
    file = run / "metrics.jsonl"
    found = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return max((row["step"] for row in found if "policy/loss" in row), default=0)
