"""Requests that are scored together do not suffer from each other."""

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from lockstep.config.model import ModelConfig
from lockstep.models.tiny_model import make_tiny
from lockstep.run.trained_models.local_reward_model import LocalRewardModel
from lockstep.run.trained_models.score_batching import ScoreBatcher


class Scorer:
    """Scores a text by its first token, from when `gate` is set. The token 13 is an error."""

    def __init__(self) -> None:
        self.began, self.gate, self.calls = threading.Event(), threading.Event(), list[list[int]]()

    def __call__(self, texts: Sequence[np.ndarray]) -> np.ndarray:
        self.began.set()
        assert self.gate.wait(20)
        self.calls.append([int(text[0]) for text in texts])
        if 13 in self.calls[-1]:
            raise RuntimeError("13")
        return np.array(self.calls[-1], np.float32)


def texts(*numbers: int) -> list[np.ndarray]:
    return [np.array([number], np.int32) for number in numbers]


async def until_waiting(batcher: ScoreBatcher, count: int) -> None:
    async with asyncio.timeout(20):
        while batcher.waiting != count:
            await asyncio.sleep(0.001)


def test_what_is_wrong_with_a_request_does_not_fail_those_computed_with_it() -> None:
    scorer = Scorer()
    batcher = ScoreBatcher(scorer, max_waiting=10, batch_tokens=100)

    async def ask() -> list[Any]:
        first = asyncio.create_task(batcher.scores(texts(1)))
        assert await asyncio.to_thread(scorer.began.wait, 20)
        later = [asyncio.create_task(batcher.scores(texts(*each))) for each in ((2, 3), (4, 13), (5,))]
        await until_waiting(batcher, 5)
        scorer.gate.set()
        return await asyncio.gather(first, *later, return_exceptions=True)

    first, second, wrong, third = asyncio.run(ask())
    assert (first.tolist(), second.tolist(), third.tolist()) == ([1.0], [2.0, 3.0], [5.0])
    assert isinstance(wrong, RuntimeError)
    assert scorer.calls == [[1], [2, 3, 4, 13, 5], [2, 3], [4, 13], [5]]


def test_a_cancelled_request_makes_room_and_is_not_computed() -> None:
    scorer = Scorer()
    batcher = ScoreBatcher(scorer, max_waiting=3, batch_tokens=100)

    async def ask() -> None:
        first = asyncio.create_task(batcher.scores(texts(1)))
        assert await asyncio.to_thread(scorer.began.wait, 20)
        leaving = asyncio.create_task(batcher.scores(texts(2, 3, 4)))
        await until_waiting(batcher, 3)
        leaving.cancel()
        await until_waiting(batcher, 0)
        staying = asyncio.create_task(batcher.scores(texts(5, 6)))
        await until_waiting(batcher, 2)
        scorer.gate.set()
        await asyncio.gather(first, staying)

    asyncio.run(ask())
    assert scorer.calls == [[1], [5, 6]] and batcher.counters.texts == 3


def test_the_longest_text_is_that_of_the_option_or_of_the_model_less_one(tmp_path: Path) -> None:
    shape: dict[str, Any] = {"hidden": 16, "layers": 1, "heads": 2, "kv_heads": 1, "ffn": 32, "max_length": 32}
    make_tiny(tmp_path / "lm", **shape, alphabet="0123456789=")
    scorer = AutoModelForSequenceClassification.from_pretrained(tmp_path / "lm", num_labels=1, dtype=torch.float32)
    scorer.save_pretrained(tmp_path / "rm")
    AutoTokenizer.from_pretrained(tmp_path / "lm").save_pretrained(tmp_path / "rm")
    for given, longest in ((None, 31), (31, 31), (32, 31), (12, 12), (100, 31)):
        config = ModelConfig(path=str(tmp_path / "rm"), max_length=given)
        loaded = LocalRewardModel(config, torch.device("cpu"), 64)
        assert loaded.longest == longest
        assert loaded.score([np.full(longest, 5, np.int32)]).shape == (1,)
