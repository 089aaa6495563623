"""The message about a failed run is brief and shows the user's own stack frames."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.base.wait_state import WaitTimeout
from lockstep.cli.failure_message import describe_failure, show_failure, user_frames
from lockstep.cluster.protocol import RemoteError, WorkerDied
from lockstep.cluster.rpc.service_runner import failure_message
from lockstep.config.errors import ConfigError, ConfigProblem
from lockstep.ledger.errors import LedgerFull
from lockstep.ledger.ledger import Ledger
from lockstep.models.errors import ModelError
from lockstep.rewards.scoring_messages import RewardError
from lockstep.run.errors import NotStarted


def users_module(folder: Path, text: str) -> dict:
    file = folder / "users.py"
    file.write_text(text)
    names: dict = {}
    exec(compile(text, str(file), "exec"), names)
    return names


def remote(error: BaseException) -> RemoteError:
    """The error as it arrives from a worker."""
    summary = failure_message(1, error)
    return RemoteError("policy-1", 1, summary.kind, summary.message, summary.traceback, summary.code)


def raised_error(call, *arguments) -> BaseException:
    with pytest.raises(Exception) as info:
        call(*arguments)
    error = info.value
    assert error.__traceback__ is not None
    return error.with_traceback(error.__traceback__.tb_next)  # without this function's frame


def test_the_users_frames_of_a_workers_traceback_are_shown(tmp_path: Path) -> None:
    names = users_module(tmp_path, "import json\n\n\ndef read(text):\n    return json.loads(text)\n")
    summary = describe_failure(remote(raised_error(names["read"], "{")))
    assert summary.headline.startswith("policy-1: JSONDecodeError: Expecting property name")
    assert summary.lines[:2] == [f'File "{tmp_path}/users.py", line 5, in read', "  return json.loads(text)"]
    assert "json/" not in "".join(summary.lines)


def test_without_user_frames_lockstep_frames_are_shown() -> None:
    summary = describe_failure(
        remote(raised_error(RewardError, 1, 2, 3, 4, 5, 6, 7, 8))
    )  # too many arguments: raised outside of lockstep
    assert (summary.headline.partition(": ")[2].partition(":")[0], summary.lines) == ("TypeError", [])
    summary = describe_failure(remote(raised_error(LedgerFull, Path("x"), "many", 1, "")))
    assert summary.headline.startswith("policy-1: ValueError")
    assert "ledger/errors.py" in summary.lines[0] and "need" in summary.lines[1]


def test_an_error_with_a_code_is_shown_without_traceback() -> None:
    summary = describe_failure(remote(ModelError("model.path", "x", "is torn", "fetch it again")))
    assert (summary.headline, summary.lines) == ("policy-1: ModelError: model.path = 'x': is torn; fetch it again", [])


def test_the_users_frames_of_a_stuck_process_are_shown_innermost_last(tmp_path: Path) -> None:
    """Faulthandler has dumped the stacks of two threads twice."""
    file = tmp_path / "stuck.py"
    file.write_text(
        "import faulthandler, json, sys, threading, time\n"
        "def score(): wait_for_ever()\n"
        "def wait_for_ever(): time.sleep(1.0)\n"
        "threading.Thread(target=threading.Event().wait, args=(2,), daemon=True).start()\n"
        "print('scorer-0 starts', file=sys.stderr)\n"
        "faulthandler.dump_traceback_later(0.3, repeat=True)\n"
        "score()\n"
    )
    log = subprocess.run([sys.executable, str(file)], capture_output=True, text=True, timeout=60, check=True).stderr
    assert log.count("most recent call first") >= 2
    frames = user_frames(f"--- end of the log of scorer-0 ---\n{log}")
    assert [line.rpartition(" in ")[2] for line in frames] == ["<module>", "score", "wait_for_ever"]
    summary = describe_failure(RewardError("f.py:score", "did not finish", "0:1#2", 1, "42", traceback=log))
    assert summary.lines == ["running at:", *frames]
    assert summary.details == [("sample", "0:1#2 (row 1 of the data)"), ("completion", "'42'")]


def test_the_end_of_a_dead_workers_log_is_shown() -> None:
    log = "\n".join(f"line {n}" for n in range(40))
    summary = describe_failure(WorkerDied("engine-0", 0, -9, log))
    assert summary.headline.startswith("engine-0 was killed by SIGKILL (out of memory?")
    assert (summary.lines[0], summary.lines[-1], len(summary.lines)) == ("line 28", "line 39", 12)
    too_large = describe_failure(WorkerDied("policy-0", 0, -signal.SIGXFSZ, log))
    assert too_large.headline.startswith(
        "policy-0 was killed by SIGXFSZ (it wrote a file over the limit of `ulimit -f`); the end of its log"
    )
    assert describe_failure(WorkerDied("engine-0", 0, 3, log)).headline == "engine-0 exited with 3; the end of its log:"
    assert describe_failure(WorkerDied("engine-0", 0, None, log)).headline == "engine-0 vanished"


@pytest.mark.parametrize(
    ("error", "headline"),
    [
        (ConfigError("run.yaml", [ConfigProblem("steps", "is required")]), "run.yaml: steps: is required"),
        (WaitTimeout("queue", "engines", "step 3", 2.0), "waited 2.0 s for engines (queue): step 3"),
        (KeyError("lr"), "KeyError: 'lr'"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_other_errors(error: Exception, headline: str) -> None:
    assert describe_failure(error).headline == headline


def test_the_printed_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    error = RewardError("f.py:score", "raised [bold]", "0:1#2", 1, "\x1b[31m[red]", traceback="Traceback\n  [x]\n")
    Ledger.create(tmp_path / "run", {}).close()
    show_failure(error, tmp_path / "run")
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "error reward f.py:score: raised [bold]",
        "  sample      0:1#2 (row 1 of the data)",
        "  completion  '\\x1b[31m[red]'",
        "",
        "    Traceback",
        "      [x]",
        "",
        f"resume with: lockstep train --resume {tmp_path}/run",
        f"full logs: {tmp_path}/run/logs",
    ]


def test_secrets_in_an_error_are_hidden(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DB_PASS", "correct-horse-battery")
    traceback = 'Traceback:\n  File "/home/me/reward.py", line 3, in score\n    login("correct-horse-battery")'
    show_failure(RewardError("reward.py:score", "401 for postgres://me:swordfish@host", traceback=traceback), tmp_path)
    shown = capsys.readouterr().err
    assert "reward.py" in shown and "correct-horse" not in shown and "swordfish" not in shown


def test_a_run_that_did_not_start_cannot_be_resumed(tmp_path: Path, capsys) -> None:
    try:
        raise NotStarted(tmp_path / "run", tmp_path / "run.failed-1") from ValueError("no")
    except NotStarted as error:
        show_failure(error, tmp_path / "run")
    err = capsys.readouterr().err
    assert err.startswith("error ValueError: no\n") and "--resume" not in err and "/logs" not in err
    assert f"{tmp_path}/run is kept as {tmp_path}/run.failed-1" in err
    show_failure(KeyError("a bug"), tmp_path / "run")
    assert capsys.readouterr().err == "error KeyError: 'a bug'\n", "there is no run to resume"
