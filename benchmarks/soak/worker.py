"""A process of a bare job: `python -m benchmarks.soak.worker RUN NAME FOLDER SEED SILENCE_S [ACTIVITY ...]`.

`policy-0` requests one step after the other and waits until all others have done it. The others wait for their next
request, perform an activity without counter progress, and then count it. Every second activity is short.
"""

import random
import sys
from pathlib import Path

from benchmarks.soak.activities import ACTS, perform
from lockstep.base import waits
from lockstep.watch.agent.report_messages import WAITING_FOR_WORK
from lockstep.watch.beacon.writer import current_beacon, open_beacon

BOUND_S = 3600.0


def lead(folder: Path, others: list[str]) -> None:
    step = 0
    while not (folder / "end").exists():
        step += 1
        current_beacon().stage("wait")
        (folder / f"order.{step}").touch()
        for other in others:
            waits.poll(
                lambda other=other: (folder / f"{other}.{step}").exists() or None,  # noqa: B023
                kind="future", waits_for=other, why=f"step {step}", timeout_s=BOUND_S, notice_after_s=None,
                every_s=0.05,
            )  # fmt: skip
        current_beacon().progress("step", step)


def follow(folder: Path, name: str, chance: random.Random, silence_s: float, acts: list[str]) -> None:
    step = 0
    while True:
        step += 1
        current_beacon().stage("idle")
        waits.poll(
            lambda: (folder / f"order.{step}").exists() or None, kind="condition", waits_for="policy-0",  # noqa: B023
            why=WAITING_FOR_WORK, timeout_s=BOUND_S, notice_after_s=None, every_s=0.05,
        )  # fmt: skip
        act = chance.choice(acts)
        current_beacon().stage(f"step {step}")  # a new stage name, so that no earlier duration raises the threshold
        perform(act, silence_s * chance.choice((0.3, 1.0, 1.15)), folder / "acts.jsonl")
        current_beacon().progress("step", step)
        (folder / f"{name}.{step}").touch()


def main() -> None:
    run, name, folder, seed, silence_s, *rest = sys.argv[1:]
    role, _, rank = name.rpartition("-")
    open_beacon(run, name, role, int(rank))
    if name == "policy-0":
        lead(Path(folder), rest)
    else:
        follow(Path(folder), name, random.Random(f"{seed} {name}"), float(silence_s), rest or list(ACTS))


if __name__ == "__main__":
    main()
