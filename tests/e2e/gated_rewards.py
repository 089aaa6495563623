"""Reward functions that tests pause or control while a real run is in progress."""

import time
from pathlib import Path

from forked_controller import BOUND_S
from harness import Launched

_GATE = '''
import time
from pathlib import Path

HERE = Path(__file__).parent


def gate(prompts, completions, trainer_state, **columns):
    """Waits at a closed gate. Applies to no sample, so it changes no reward."""
    step = trainer_state.global_step
    (HERE / f"reached-{step}").touch()
    while (HERE / f"closed-{step}").exists():
        time.sleep(0.005)
    return [None] * len(completions)
'''


class Gate:
    """A reward term (`term`) at which a run stops in the reward stage of the steps for which it is closed."""

    def __init__(self, folder: Path, *closed: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        (folder / "gate.py").write_text(_GATE)
        for step in closed:
            (folder / f"closed-{step}").touch()

    @property
    def term(self) -> dict[str, str]:
        return {"kind": "function", "path": f"{self.folder}/gate.py:gate"}

    def wait(self, step: int, launched: Launched) -> None:
        """Wait until the run has stopped at the gate in this step."""
        deadline = time.monotonic() + BOUND_S
        while not (self.folder / f"reached-{step}").exists():
            assert launched.process.poll() is None, launched.text()
            assert time.monotonic() < deadline, f"the run did not reach step {step}:\n{launched.text()}"
            time.sleep(0.02)

    def open(self, step: int) -> None:
        (self.folder / f"closed-{step}").unlink()
