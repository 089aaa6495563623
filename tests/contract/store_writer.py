"""A process that writes a run to a store, and may be killed before or after any call to the store."""

import os
import signal
from pathlib import Path

import numpy as np

from lockstep.data.samples import Completion, Group, Prompt, Rollouts
from lockstep.ledger import Ledger
from lockstep.ledger.store import mirror as mirrors
from lockstep.ledger.store.object_store import ObjectStore

CALLS = ("create", "upload", "read", "names", "delete")
CONFIG = {"recipe": "grpo", "name": "run", "steps": 100}


class KilledAt:
    """A store whose process is killed before or after a call."""

    def __init__(self, inner: ObjectStore, number: int, after: bool) -> None:
        self.inner, self.url, self.number, self.after, self.calls = inner, inner.url, number, after, 0

    def __getattr__(self, name):
        call = getattr(self.inner, name)
        if name not in CALLS:
            return call

        def counted(*arguments):
            self.calls += 1
            if self.calls == self.number and not self.after:
                os.kill(os.getpid(), signal.SIGKILL)
            answer = call(*arguments)
            if self.calls == self.number:
                os.kill(os.getpid(), signal.SIGKILL)
            return answer

        return counted


def rollouts(step: int) -> Rollouts:
    """Rollouts that are a function of the step."""
    tokens = np.arange(step, step + 5, dtype=np.int32)
    completion = Completion(
        request=f"{step}:0", tokens=tokens, logprobs=np.float32(tokens) / -7, versions=tokens * 0, finish="stop",
        text=f"text {step}",
    )  # fmt: skip
    prompt = Prompt(f"0:{step}", step, tokens[:2], f"prompt {step}", None, "7", {})
    return Rollouts(step, step, [Group(prompt, [completion], np.float32([step / 2]), {})])


def do_step(ledger: Ledger, step: int) -> None:
    ledger.record_rollouts(step, rollouts(step), {"seed": step})
    ledger.commit(step, {"loss": 1.0 / (step + 1)})
    ledger.record_metrics(step, {"loss": 1.0 / (step + 1)})
    if step % 2:
        checkpoint = ledger.folder / "checkpoints" / f"{step + 1:08d}"
        checkpoint.mkdir(exist_ok=True)
        (checkpoint / "rank0.safetensors").write_bytes(bytes([step]) * 100_000)
        (checkpoint / "checkpoint.json").write_text(f'{{"steps": {step + 1}}}')
        ledger.record_checkpoint(step, checkpoint)
        for row in ledger.checkpoints()[:-2]:
            ledger.forget_checkpoint(row.step)
            for path in row.path.iterdir():
                path.unlink()
            row.path.rmdir()
        ledger.delete_unneeded_steps()


def follow(mirror: mirrors.StoreMirror, folder: Path) -> None:
    """Makes the mirror copy this folder when the test says so: `start` without the thread."""
    mirror._folder = folder
    mirrors.write_state(folder, mirrors.StoreState(mirror.url, (mirror._writer,)))


def write_run(
    url: str, folder: Path, steps: int, log: Path, env: dict[str, str], kill_at: int = 0, after: bool = False
) -> None:
    """Continues the run in the folder, or begins it: collects steps, with a checkpoint after every second one, and
    copies the run after each. Writes the steps of each complete state into the log, and at the end the number of
    calls to the store."""
    os.environ.update(env)
    resuming = (folder / "ledger.sqlite").exists()
    mirror = mirrors.StoreMirror(url, folder.name, str(folder.parent))
    killed = mirror._store = KilledAt(mirror._store, kill_at, after)
    mirror.claim(folder if resuming else None)
    with Ledger.resume(folder) if resuming else Ledger.create(folder, CONFIG) as ledger, log.open("a") as lines:
        follow(mirror, folder)
        for step in range(len(ledger.collected_steps()), steps):
            do_step(ledger, step)
            mirror.copy_now()
            lines.write(f"{step + 1}\n")
            lines.flush()
        mirror.copy_now()
        lines.write(f"{killed.calls}\n")
