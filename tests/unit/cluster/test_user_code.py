"""Processes that run user code: a lost node is not the code's fault."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lockstep.cluster.protocol import WorkerDied
from lockstep.cluster.user_code import (
    MAX_LOST_NODES,
    UserCodeNotLoaded,
    recorded_loss,
    retry_lost_nodes,
    wait_until_loaded,
)

WITH_NODE = WorkerDied("scorer-0", 0, None, "", "its node b is lost")
BY_ITSELF = WorkerDied("scorer-0", 0, -11, "Segmentation fault")


def test_a_users_file_does_not_take_the_place_of_pythons_modules(tmp_path: Path) -> None:
    """It may import its neighbours, also one with the name of an installed package."""
    (tmp_path / "tty.py").write_text("raise RuntimeError('the user's tty')")
    (tmp_path / "yaml.py").write_text("MINE = True")
    (tmp_path / "rewards.py").write_text("import helpers, yaml\nassert yaml.MINE\ndef score(): return helpers.ONE")
    (tmp_path / "helpers.py").write_text("ONE = 1")
    code = (
        "import sys; from lockstep.cluster.user_code import load_object\n"
        "print(load_object(sys.argv[1])())\n"
        "import tty; print(tty.__file__)"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, f"{tmp_path}/rewards.py:score"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    one, tty = done.stdout.split()
    assert one == "1" and not Path(tty).is_relative_to(tmp_path)


class Answer:
    """A call with a result or an error."""

    def __init__(self, ends: WorkerDied | None = None) -> None:
        self.ends = ends

    def done(self) -> bool:
        return True

    def result(self, why: str, stall_s: float | None = None) -> str:
        if self.ends is not None:
            raise self.ends
        return why


def test_a_lost_node_is_no_load_failure() -> None:
    assert wait_until_loaded(Answer(), "rewards.py", "scorer-0", lambda: None) == "loading rewards.py"
    with pytest.raises(WorkerDied, match="its node b is lost"):
        wait_until_loaded(Answer(WITH_NODE), "rewards.py", "scorer-0", lambda: None)
    with pytest.raises(UserCodeNotLoaded, match="its process was ended by signal 11 while loading") as caught:
        wait_until_loaded(Answer(BY_ITSELF), "rewards.py", "scorer-0", lambda: None)
    assert "Segmentation fault" in caught.value.log_tail


@pytest.mark.parametrize("lost", range(MAX_LOST_NODES + 1))
def test_work_is_repeated_after_lost_nodes(lost: int, caplog: pytest.LogCaptureFixture) -> None:
    coming = iter([Answer(WITH_NODE if number < lost else None) for number in range(MAX_LOST_NODES + 1)])
    if lost < MAX_LOST_NODES:
        assert retry_lost_nodes(lambda: next(coming).result("scores"), "scores") == "scores"
    else:
        with pytest.raises(WorkerDied):
            retry_lost_nodes(lambda: next(coming).result("scores"), "scores")
    told = ["scorer-0 vanished (its node b is lost); a new process scores in its place"] * min(lost, MAX_LOST_NODES - 1)
    assert caplog.messages == told


def test_work_is_not_repeated_after_a_crash() -> None:
    coming = iter([Answer(BY_ITSELF), Answer()])
    with pytest.raises(WorkerDied, match="exited with -11"):
        retry_lost_nodes(lambda: next(coming).result("scores"), "scores")
    assert next(coming).ends is None


def test_a_loss_is_recorded_with_its_outcome_and_without_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_API_KEY", "hunter2-hunter2")
    noted: list[dict[str, Any]] = []

    def note(action: str, **fields: Any) -> None:
        noted.append({"action": action, **fields})

    with recorded_loss(note, "scorer-0", "reward", "its process exited with 3"):
        pass
    with pytest.raises(ValueError), recorded_loss(note, "scorer-0.1", "reward", "did not answer"):
        raise ValueError("refused hunter2-hunter2\nand more")
    assert [(each["action"], each["what"]) for each in noted] == [
        ("failed", "exited with 3"), ("restarted", "exited with 3"), ("failed", "did not answer"),
        ("gave up", "did not answer"),
    ]  # fmt: skip
    assert noted[-1]["reason"].startswith("refused") and "hunter2" not in noted[-1]["reason"]
