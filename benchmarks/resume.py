"""How long a run is without its controller, when that is killed and the run resumed at once.

    python -m benchmarks.resume                  the demo's GRPO run, killed three times with a grace and without
    python -m benchmarks.resume --load-s 20      with a reward function whose module takes 20 s to import

Measured from the command `lockstep train --resume` (and from the moment at which it claims the run) until the first
step is committed. With `cluster.orphan_grace_s` engine, scorer and the fork server of the trainer ranks go on; without,
all are started again. The module that sleeps stands for a model that a reward function loads.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.recovery import BOUND_S, Demo
from lockstep.ledger.ledger import Ledger

GRACE_S = 120.0
SLOW = """import time

time.sleep({seconds})


def score(prompts, completions, **columns):
    return [None] * len(completions)
"""


class Resumed(Demo):
    """The demo with a grace for its workers, and a reward that takes long to load."""

    def __init__(self, folder: Path, steps: int, grace_s: float, load_s: float) -> None:
        folder.mkdir()
        (folder / "slow.py").write_text(SLOW.format(seconds=load_s))
        more = {"cluster.orphan_grace_s": grace_s, "checkpoint.every": 2, "evaluation": "null"}
        if load_s:
            terms = [{"kind": "exact_match"}, {"kind": "function", "path": f"{folder}/slow.py:score"}]
            more["reward.terms"] = json.dumps(terms)
        super().__init__(folder, steps, **more)

    def resume(self) -> tuple[float, float]:
        """Kills the controller and goes on; seconds until the first commit, from the command and from the claim."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(BOUND_S)
        began = time.time()
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-c", "from lockstep.cli import app; app()", "train", "--resume", str(self.run)],
                env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}, stdout=output, stderr=output,
            )  # fmt: skip
        with Ledger.reader(self.run) as ledger:
            former = ledger.generation

        def committed() -> bool:
            with Ledger.reader(self.run) as ledger:
                return any(row.generation > former for row in ledger.commits())

        self.until(committed, "committed again")
        with Ledger.reader(self.run) as ledger:
            first = min(row.at for row in ledger.commits() if row.generation > former)
            claimed = max(event.at for event in ledger.events() if event.kind == "start")
        return first - began, first - claimed


def measure(folder: Path, grace_s: float, load_s: float, repeats: int) -> list[tuple[float, float]]:
    demo = Resumed(folder, 10_000, grace_s, load_s)
    found, step = [], 2
    for _ in range(repeats):
        step = demo.stage("train", step)
        found.append(demo.resume())
    demo.process.send_signal(signal.SIGINT)
    demo.process.send_signal(signal.SIGINT)
    demo.process.wait(BOUND_S)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--load-s", type=float, default=0.0, help="what the reward's module takes to import")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="lockstep-resume-") as scratch:
        for name, grace_s in (("adopted", GRACE_S), ("started anew", 0.0)):
            found = measure(Path(scratch) / name.replace(" ", "-"), grace_s, options.load_s, options.repeats)
            commands, claims = zip(*found, strict=True)
            print(
                f"{name}: first step after {statistics.median(commands):.1f} s (median of {len(found)}: "
                f"{', '.join(f'{each:.1f}' for each in commands)}), {statistics.median(claims):.1f} s after the claim",
                flush=True,
            )


if __name__ == "__main__":
    main()
