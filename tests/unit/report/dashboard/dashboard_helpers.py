"""Small runs for the tests of the dashboard, and a client of its application without a socket."""

import asyncio
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from lockstep.ledger import CompletionSample, Ledger
from lockstep.report.dashboard.dashboard_server import DashboardServer
from lockstep.report.dashboard.run_catalogue import RunCatalogue

TOKEN = "5f1c0e7a92d84b36a1c7"
CONFIG: dict[str, Any] = {
    "recipe": "grpo", "name": "small", "folder": "runs", "steps": 40, "model": {"path": "model"},
    "trainer": {"optimizer": {"lr": 0.001, "betas": [0.9, 0.99]}},
    "reward": {"terms": [{"kind": "http", "api_key": "hf_abcdefghijklmnopqrstuvwxyz0123"}]},
}  # fmt: skip
STAGES = {"rollout": 0.5, "train": 0.25}


def make_run(folder: Path, steps: int = 30, config: dict[str, Any] | None = None, end: str | None = None) -> Path:
    """A run of some steps. `end`: how it ended; None: without an end, as if it was killed."""
    with Ledger.create(folder, config or {**CONFIG, "name": folder.name}) as ledger:
        ledger.record_event("start", ranks=2)
        ledger.record_evaluation(-1, {"eval/score": 0.1}, samples_at(0))
        add_steps(ledger, 0, steps)
        if steps:
            ledger.record_evaluation(steps - 1, {"eval/score": 0.9}, samples_at(steps))
        if end is not None:
            ledger.record_event("end", reason=end, steps=steps)
    return folder


def add_steps(ledger: Ledger, first: int, last: int) -> None:
    for step in range(first, last):
        times = {f"time/{name}_s": seconds for name, seconds in STAGES.items()}
        row = {"reward/mean": math.sin(step), "policy/loss": 1 / (step + 1), **times, "time/step_s": 0.75}
        ledger.record_metrics(step, row)
        ledger.record_samples(
            step, [CompletionSample(f"prompt {step}", f"completion {step}", uid=f"p:{step}", reward=1.0)]
        )
        ledger.commit(step, {})


def samples_at(step: int) -> list[CompletionSample]:
    texts = ["<script>alert(1)</script>", f"after {step} steps", "x" * 6000]
    return [
        CompletionSample(f"question {number}", text, uid=f"e:{number}", reward=float(number), scores={"match": 0.5})
        for number, text in enumerate(texts)
    ]


def server_of(*paths: Path, host: str = "127.0.0.1") -> DashboardServer:
    return DashboardServer(RunCatalogue(paths), TOKEN, host)


def ask(
    server: DashboardServer, paths: Sequence[str] | str, headers: dict[str, str] | None = None, method: str = "GET"
) -> Any:
    """The answer of the application, or those to several requests at once."""

    async def all_at_once() -> list[httpx.Response]:
        transport = httpx.ASGITransport(server.app)  # type: ignore[arg-type]
        sent = {"authorization": f"Bearer {TOKEN}"} if headers is None else headers
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000", headers=sent) as client:
            chosen = [paths] if isinstance(paths, str) else paths
            return await asyncio.gather(*(client.request(method, path) for path in chosen))

    answers = asyncio.run(all_at_once())
    return answers[0] if isinstance(paths, str) else answers


def run_id(server: DashboardServer, number: int = 0) -> str:
    return str(ask(server, "/api/runs").json()["runs"][number]["id"])
