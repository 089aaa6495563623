"""Reward models behind `lockstep serve-reward`, and their scores by transformers alone."""

import os
import re
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch
from harness import LOCKSTEP
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from lockstep.data.samples import Prompt
from lockstep.models.tiny_model import make_tiny
from lockstep.rewards.scoring_messages import RewardSample, ScoringBatch


def make_reward_model(home: Path, **shape: Any) -> Path:
    """A tiny reward model with random weights, of which the head gives scores of about one."""
    make_tiny(home / "lm", **shape)
    torch.manual_seed(2)
    scorer = AutoModelForSequenceClassification.from_pretrained(home / "lm", num_labels=1, dtype=torch.float32)
    torch.nn.init.normal_(scorer.score.weight, std=0.3)
    scorer.save_pretrained(home / "rm")
    AutoTokenizer.from_pretrained(home / "lm").save_pretrained(home / "rm")
    return home / "rm"


def reference_scores(model: Path, texts: Sequence[Sequence[int]]) -> list[float]:
    """The score of each text, given by its tokens, alone in a forward pass of transformers."""
    scorer = AutoModelForSequenceClassification.from_pretrained(model, num_labels=1, dtype=torch.float32)
    with torch.no_grad():
        return [float(scorer(torch.tensor([tokens])).logits[0, 0]) for tokens in texts]


@dataclass
class Server:
    process: subprocess.Popen[str]
    url: str
    log: Path
    token: str

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.token}"}

    def post(self, path: str, body: Any) -> httpx.Response:
        return httpx.post(f"{self.url}{path}", json=body, headers=self.headers, timeout=30)

    def metrics(self) -> dict[str, str]:
        text = httpx.get(f"{self.url}/metrics", headers=self.headers).text
        return dict(line.rsplit(" ", 1) for line in text.splitlines())


@contextmanager
def serving(model: Path, home: Path, *options: str, given: str | None = None) -> Iterator[Server]:
    """A server of a user with this home folder. `given`: the variable with the token; without it, there is a file."""
    command = [*LOCKSTEP, "serve-reward", str(model), "--port", "0", "--threads", "1", *options]
    environment = {**os.environ, "HOME": str(home), "COLUMNS": "200"}
    if given is not None:
        environment["LOCKSTEP_REWARD_TOKEN"] = given
    log = home / "server.log"
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment, text=True)
    try:
        until = time.monotonic() + 90
        while not (found := re.search(r"serving .* at (http://\S+)", log.read_text())):
            assert process.poll() is None and time.monotonic() < until, log.read_text()
            time.sleep(0.1)
        token = given if given is not None else (home / ".lockstep" / "reward_token").read_text()
        yield Server(process, found[1], log, token.strip())
    finally:
        process.kill()
        process.wait(10)


def rows(texts: list[str], chat: bool = False) -> ScoringBatch:
    """Two prompts with these completions each."""
    none = np.zeros(1, np.int32)
    prompts = [
        Prompt(f"0:{row}", row, none, text, [{"role": "user", "content": text}] if chat else None)
        for row, text in enumerate(("12=", "90="))
    ]
    samples = [RewardSample(row, index, text, none, 1) for row in (0, 1) for index, text in enumerate(texts)]
    return ScoringBatch(0, prompts, samples)
