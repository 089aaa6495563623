"""`/get_reward` gives the rewards of OpenRLHF's serve_rm (0.11.2) for what OpenRLHF's trainers send; where it differs,
it differs as docs/reward-models.md says."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from served_rewards import make_reward_model
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from lockstep.config.model import ModelConfig
from lockstep.run.trained_models.local_reward_model import LocalRewardModel
from lockstep.run.trained_models.reward_server import RewardServer, ServerLimits

CONTEXT = 64
SENT = [
    "<bos>12=12<eos>",
    "<bos>7=<eos>",
    "<bos>0123456789012345678901234567890=1<eos>",
    "<bos><user>1<assistant>2<eos>",
]


@pytest.fixture(scope="module", params=[True, False], ids=["with bos", "without bos"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape: dict[str, Any] = {"hidden": 32, "layers": 2, "heads": 2, "kv_heads": 1, "ffn": 64, "max_length": CONTEXT}
    shape |= {"family": "llama", "bos": True} if request.param else {}
    return make_reward_model(tmp_path_factory.mktemp("rm"), **shape, alphabet="0123456789=", chat=True, seed=4)


def asked(model: Path, *bodies: dict[str, Any]) -> list[dict[str, Any]]:
    """The answers of Lockstep's server to requests that come at once."""
    loaded = LocalRewardModel(ModelConfig(path=str(model)), torch.device("cpu"), 64)

    async def post() -> list[httpx.Response]:
        transport = httpx.ASGITransport(app=RewardServer(loaded, "rm", None, ServerLimits()).app)
        async with httpx.AsyncClient(transport=transport, base_url="http://rm", timeout=60) as client:
            return await asyncio.gather(*(client.post("/get_reward", json=body) for body in bodies))

    return [answer.json() for answer in asyncio.run(post())]


def serve_rm(model: Path, queries: Sequence[str], batch: int | None = None, most: int = 2048) -> list[float]:
    """What serve_rm computes: tokens without special ones, of which the first `most` stay; rows padded on the left,
    with positions that begin at the first token; the head's value at the last token."""
    scorer = AutoModelForSequenceClassification.from_pretrained(model, num_labels=1, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(model)
    rows = [tokenizer(query, add_special_tokens=False)["input_ids"][:most] for query in queries]
    found: list[float] = []
    size = batch or len(rows)
    for start in range(0, len(rows), size):
        part = rows[start : start + size]
        width = max(map(len, part))
        pads = [width - len(row) for row in part]
        ids = torch.tensor([[tokenizer.pad_token_id] * pad + row for pad, row in zip(pads, part, strict=True)])
        mask = torch.tensor([[0] * pad + [1] * (width - pad) for pad in pads])
        positions = torch.tensor([[1] * pad + list(range(width - pad)) for pad in pads])
        with torch.no_grad():
            hidden = scorer.base_model(ids, attention_mask=mask, position_ids=positions).last_hidden_state
            found += scorer.score(hidden[:, -1]).squeeze(-1).tolist()
    return found


def near(scores: Sequence[float]) -> Any:
    return pytest.approx(list(scores), abs=1e-5)


@pytest.mark.parametrize("batch", [None, 1, 3])
def test_rewards_of_what_trainers_send_are_those_of_serve_rm(model: Path, batch: int | None) -> None:
    """The decoded tokens of prompt and completion; one request with all of them, and requests with one."""
    sent = SENT if AutoTokenizer.from_pretrained(model).bos_token else [text.removeprefix("<bos>") for text in SENT]
    wanted = serve_rm(model, sent, batch)
    body = {"query": sent, "prompts": sent, "labels": [None] * len(sent)}
    whole, *single = asked(model, body, *({"query": [text], "prompts": [""], "labels": [""]} for text in sent))
    assert whole.keys() == {"rewards", "scores", "extra_logs"} and whole["extra_logs"] == {}
    assert whole["rewards"] == whole["scores"] == near(wanted)
    assert [answer["rewards"][0] for answer in single] == near(wanted)


def test_a_text_is_scored_at_its_end_of_sequence_token(model: Path) -> None:
    """serve_rm scores a completion that was cut off at its last token, where no reward model was trained."""
    (answer,) = asked(model, {"query": ["12=1"], "add_special_tokens": False})
    assert answer["rewards"] == near(serve_rm(model, ["12=1<eos>"]))
    assert answer["rewards"] != near(serve_rm(model, ["12=1"]))


def test_plain_text_begins_as_in_training(model: Path) -> None:
    """serve_rm adds no beginning-of-sequence token; here it is added unless the request says otherwise."""
    bos = AutoTokenizer.from_pretrained(model).bos_token or ""
    added, bare = asked(model, {"query": ["12=1<eos>"]}, {"query": ["12=1<eos>"], "add_special_tokens": False})
    assert added["rewards"] == near(serve_rm(model, [f"{bos}12=1<eos>"]))
    assert bare["rewards"] == near(serve_rm(model, ["12=1<eos>"]))


def test_a_long_text_keeps_its_end(model: Path) -> None:
    """serve_rm keeps the beginning of it."""
    text, most = "9" * 40 + "0123456789" * 4 + "<eos>", CONTEXT - 1
    (answer,) = asked(model, {"query": [text], "add_special_tokens": False})
    kept = "9" * (40 - (40 + 41 - most)) + "0123456789" * 4 + "<eos>"
    assert answer["rewards"] == near(serve_rm(model, [kept]))
    assert answer["rewards"] != near(serve_rm(model, [text], most=most))
