"""Real runs: GRPO on a tiny model, two trainer ranks, an engine, two scorers, and an HTTP judge."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from benchmarks.runner import ROOT
from benchmarks.soak.activities import JUDGE
from benchmarks.soak.bare_processes import SILENCE
from benchmarks.soak.finding_counts import Tally
from lockstep.ledger.ledger import Ledger
from lockstep.models.tiny_model import make_tiny
from lockstep.watch.beacon.reader import read_beacons
from lockstep.watch.diagnosis.verdict import StallThresholds

BOUND_S = 900.0


class Run:
    """A run of a few steps: a context manager that ends the run."""

    def __init__(
        self,
        folder: Path,
        patience: StallThresholds,
        seed: int,
        tally: Tally,
        environment: dict[str, str],
        steps: int = 6,
    ) -> None:
        self.folder, self.patience, self.tally = folder, patience, tally
        self.record = folder / "acts.jsonl"
        self._environment = environment
        folder.mkdir(parents=True)
        make_tiny(
            folder / "model", hidden=128, layers=2, heads=4, kv_heads=2, ffn=512, max_length=64,
            alphabet="0123456789=", seed=seed % 1000,
        )  # fmt: skip
        numbers = [f"{(7 * n) % 100:02d}" for n in range(20)]
        with (folder / "data.jsonl").open("w") as file:
            file.writelines(json.dumps({"prompt": f"{n}=", "answer": n[0]}) + "\n" for n in numbers)
        (folder / "soak.yaml").write_text(yaml.safe_dump(self._config(seed, steps)))

    def _config(self, seed: int, steps: int) -> dict[str, Any]:
        silence_s = SILENCE * self.patience.still_s
        arguments = {"record": str(self.record), "silence_s": silence_s, "share": 0.3}
        function = f"{ROOT}/benchmarks/soak/rewards.py:judged"
        judge = f"http://{self._environment[JUDGE]}/sometimes/{silence_s}"
        return {
            "recipe": "grpo", "name": "soak", "folder": str(self.folder / "runs"), "seed": seed, "steps": steps,
            "token_budget": 1024, "prompts_per_step": 4, "group_size": 4,
            "model": {"path": str(self.folder / "model")}, "data": {"path": str(self.folder / "data.jsonl")},
            "trainer": {"ranks": 2, "threads": 1, "optimizer": {"lr": 1e-3}},
            "rollout": {"sampling": {"max_tokens": 56}, "engine": {"max_rows": 16, "threads": 1}},
            "reward": {
                "workers": 2, "batch_size": 4,
                "terms": [
                    {"kind": "function", "path": function, "arguments": arguments},
                    {"kind": "http", "url": judge, "weight": 0.5},
                ],
            },
            "checkpoint": {"every": 2}, "report": {"tensorboard": False, "html": False},
            "watch": {
                "notice_s": self.patience.notice_s, "confirm_after_s": self.patience.still_s, "on_stall": "report",
            },
        }  # fmt: skip

    @property
    def run(self) -> Path:
        return self.folder / "runs" / "soak"

    def __enter__(self) -> "Run":
        with (self.folder / "output.txt").open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-c", "from lockstep.cli import app; app()", "train", str(self.folder / "soak.yaml")],
                env={**os.environ, **self._environment, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
                stdout=output, stderr=output, start_new_session=True, cwd=ROOT,
            )  # fmt: skip
        return self

    def process_ids(self) -> dict[str, int]:
        """Returns the pids by name of all processes with a beacon, monitoring processes included."""
        try:
            run = (self.run / "run-id").read_text().strip()
            return {each.name: each.pid for each in read_beacons(run)} if run else {}
        except OSError:
            return {}

    def over(self) -> bool:
        return self.process.poll() is not None

    def __exit__(self, *_: object) -> None:
        try:
            code = self.process.wait(BOUND_S)
        except subprocess.TimeoutExpired:
            self.process.terminate()
            code = self.process.wait(60)
        if code != 0:
            self.tally.trouble(f"exit code {code}: {(self.folder / 'output.txt').read_text()[-1500:]}")
        if (self.run / "ledger.sqlite").exists() or self.run.exists():
            self._read()
        self.tally.acts(self.record, SILENCE * self.patience.still_s * 0.94)

    def _read(self) -> None:
        """Adds the verdicts recorded in the ledger to the tally."""
        with Ledger.reader(self.run) as ledger:
            events = [each for each in ledger.events() if each.kind == "stall"]
        for each in events:
            fields = each.fields
            incident = fields["incident"]
            verdict = {"kind": fields["verdict"], "class": fields["cause"], "who": fields["who"]}
            if incident is not None and (Path(incident) / "verdict.json").exists():
                verdict = json.loads((Path(incident) / "verdict.json").read_text())
            self.tally.note(
                fields["number"], fields["change"], fields["level"], fields["text"], verdict, incident,
                fields["said_at"], fields["who"],
            )  # fmt: skip
