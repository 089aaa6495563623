"""`lockstep dashboard`, the command itself, beside a real run: while the run trains, waits, is stopped and ends."""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from gated_rewards import Gate
from harness import LOCKSTEP, Launched, config, task, write
from typer.testing import CliRunner

from lockstep.cli import app

pytestmark = [pytest.mark.timeout(300)]
BOUND_S = 90.0


class Dashboard:
    """The running command, and a client with its token."""

    def __init__(self, *arguments: str, token: str = "") -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "LOCKSTEP_DASHBOARD_TOKEN": token}
        self.process = subprocess.Popen(
            [*LOCKSTEP, "dashboard", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=environment,
        )  # fmt: skip
        assert self.process.stdout is not None
        self.line = self.process.stdout.readline()
        found = re.fullmatch(r"(http://[\d.]+:(\d+)/)#token=(\S+)\n", self.line)
        assert found is not None, (self.line, self.process.communicate(timeout=BOUND_S))
        self.url, self.port, self.token = found[1], int(found[2]), found[3]
        self.client = httpx.Client(
            base_url=self.url, headers={"authorization": f"Bearer {self.token}"}, timeout=BOUND_S, trust_env=False
        )

    def get(self, path: str) -> Any:
        answer = self.client.get(path)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def until(self, path: str, condition: Callable[[Any], bool]) -> Any:
        """The first answer that meets the condition."""
        deadline = time.monotonic() + BOUND_S
        while not condition(found := self.get(path)):
            assert time.monotonic() < deadline, found
            time.sleep(0.1)
        return found

    def end(self) -> tuple[float, str]:
        """Ctrl-C: the seconds until the command has ended, and what it printed besides its address."""
        began = time.monotonic()
        self.process.send_signal(signal.SIGINT)
        printed, errors = self.process.communicate(timeout=BOUND_S)
        return time.monotonic() - began, printed + errors


@contextlib.contextmanager
def serving(*arguments: str, token: str = "") -> Iterator[Dashboard]:
    dashboard = Dashboard(*arguments, token=token)
    try:
        yield dashboard
    finally:
        dashboard.client.close()
        dashboard.process.kill()
        dashboard.process.communicate(timeout=BOUND_S)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return task(tmp_path_factory.mktemp("dashboard"))


@pytest.fixture(scope="module")
def ended(home: Path) -> Path:
    """A run that was watched from before its start to its end; what was seen is checked on the way."""
    gate = Gate(home / "gate", 2)
    reward = {"terms": [{"kind": "exact_match"}, {"kind": "regex", "pattern": "[0-4].*", "weight": 0.5}, gate.term]}
    values = config(home, "grpo", name="seen", steps=5, reward=reward)
    run = home / "runs" / "seen"
    run.parent.mkdir()
    with serving(str(run.parent)) as dashboard:
        assert dashboard.get("/api/runs") == {"runs": []}
        launched = Launched.start(run, str(write(home, values)))
        try:
            gate.wait(2, launched)
            watch_live(dashboard, launched)
            gate.open(2)
            assert launched.finish() == 0, launched.text()
        finally:
            launched.kill()
        found = dashboard.until("/api/runs", lambda each: each["runs"][0]["state"] == "finished")
        assert found["runs"][0]["step"] == 5
        _, printed = dashboard.end()
        assert dashboard.process.returncode == 0 and "Traceback" not in printed, printed
    return run


@pytest.fixture(scope="module")
def served(ended: Path) -> Iterator[Dashboard]:
    """One command for all tests that only read."""
    with serving(str(ended)) as dashboard:
        yield dashboard


def watch_live(dashboard: Dashboard, launched: Launched) -> None:
    """The run waits for its scorer at the gate in step 3."""
    (run,) = dashboard.get("/api/runs")["runs"]
    assert (run["name"], run["state"], run["step"], run["steps"]) == ("seen", "running", 2, 5)
    path = f"/api/runs/{run['id']}"
    graph = dashboard.until(f"{path}/waits", lambda each: any(edge["from"] == "controller" for edge in each["edges"]))
    roles = {node["role"] for node in graph["nodes"]}
    assert graph["live"] and {"controller", "policy", "rollout", "reward"} <= roles, roles
    chart = dashboard.get(f"{path}/stages")
    running = {row["name"] for number, row in enumerate(chart["rows"])
               if any(span["row"] == number and span["state"] == "running" for span in chart["spans"])}  # fmt: skip
    assert "controller" in running and chart["rows"][0]["role"] == "run"
    (host,) = dashboard.get(f"{path}/hosts")["hosts"]
    assert host["live"] and host["memory_used"] > 0
    with dashboard.client.stream("GET", f"/api/events?run={run['id']}") as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        lines = stream.iter_lines()
        assert next(line for line in lines if line.startswith("event: ")) == "event: hello"
        assert next(line for line in lines if line.startswith("event: ")) == "event: state"
        assert json.loads(next(line for line in lines if line.startswith("data: "))[6:])["state"] == "running"


def test_a_finished_run_has_curves_stages_and_samples(served: Dashboard) -> None:
    (run,) = served.get("/api/runs")["runs"]
    path = f"/api/runs/{run['id']}"
    names = [each["name"] for each in served.get(f"{path}/metrics")["names"]]
    assert {"reward/mean", "policy/loss", "time/train_s", "eval/exact_match"} <= set(names)
    curve = served.get(f"{path}/series?name=reward/mean")["series"]["reward/mean"]
    assert curve["steps"] == [1, 2, 3, 4, 5]
    spans = served.get(f"{path}/stages?from=0")["spans"]
    assert {"rollout", "reward", "train"} <= {span["stage"] for span in spans}
    assert {span["step"] for span in spans} == {1, 2, 3, 4, 5}
    samples = served.get(f"{path}/samples?step=5&limit=100")
    assert samples["total"] >= 16 and {each["version"] for each in samples["samples"]} >= {4}
    assert any("terms" in each and each["terms"] for each in samples["samples"])
    prompt = next(each for each in samples["samples"] if each["kind"] == "train")["prompt"]
    assert served.get(f"{path}/samples?query={prompt}")["total"] >= 4
    assert served.get(f"{path}/config")["config"]["trainer.ranks"] == 2


def test_ctrl_c_ends_at_once_with_open_streams(ended: Path) -> None:
    with serving(str(ended)) as dashboard:
        run = dashboard.get("/api/runs")["runs"][0]["id"]
        with contextlib.ExitStack() as stack:
            for _ in range(5):
                stream = stack.enter_context(dashboard.client.stream("GET", f"/api/events?run={run}"))
                next(stream.iter_lines())
            seconds, printed = dashboard.end()
        assert dashboard.process.returncode == 0 and printed == "", printed
        assert seconds < 20, "the machine may be busy, but nothing waits for the streams"


def test_the_token_is_new_at_each_start_and_in_no_log(ended: Path) -> None:
    chosen = "c41f0be27a9d5386e01b7fd2"
    with serving(str(ended)) as first, serving(str(ended), token=chosen) as second:
        assert len(first.token) >= 32 and first.token != second.token == chosen
        assert httpx.get(first.url + "api/runs", headers={"authorization": f"Bearer {chosen}"}).status_code == 401
        arguments = Path(f"/proc/{first.process.pid}/cmdline").read_text()
        assert first.token not in arguments
        assert first.end()[1] == "", "requests and tokens are in no log"


def test_it_works_through_a_tunnel_and_not_for_another_name(served: Dashboard) -> None:
    headers = {"authorization": f"Bearer {served.token}"}
    for host, status in (("localhost:18000", 200), ("127.0.0.1:1", 200), ("evil.example:18000", 421)):
        answer = httpx.get(served.url + "api/runs", headers={**headers, "host": host})
        assert answer.status_code == status


@pytest.mark.parametrize(
    "path", ["/../../../etc/passwd", "/./", "/%2e%2e/%2e%2e/x", "//", "/static/..", "http://x/api"]
)
def test_a_raw_path_reaches_no_file(served: Dashboard, path: str) -> None:
    with socket.create_connection(("127.0.0.1", served.port), 10) as raw:
        raw.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        raw.settimeout(BOUND_S)
        answer = b""
        while part := raw.recv(65536):
            answer += part
        assert answer.startswith((b"HTTP/1.1 404", b"HTTP/1.1 401", b"HTTP/1.1 200")) and b"root:" not in answer
        assert b" 200 " not in answer.split(b"\r\n")[0] or b"<!doctype html>" in answer.lower()


def test_a_run_folder_that_vanishes_leaves_the_others(home: Path, ended: Path, tmp_path: Path) -> None:
    shutil.copytree(ended, tmp_path / "copy")
    with serving(str(ended), str(tmp_path / "copy")) as dashboard:
        both = dashboard.get("/api/runs")["runs"]
        shutil.rmtree(tmp_path / "copy")
        assert [each["id"] for each in dashboard.get("/api/runs")["runs"]] == [both[0]["id"]]
        assert dashboard.client.get(f"/api/runs/{both[1]['id']}/metrics").status_code in (404, 410)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["missing"], "there is no such folder: give the folder of a run"),
        (["file"], "is not a folder: give the folder of a run"),
        ([".", "--host", "203.0.113.7"], "Cannot assign requested address"),
    ],
)
def test_what_cannot_be_served_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], said: str
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["dashboard", *arguments])
    assert done.exit_code == 2 and done.stdout == "" and isinstance(done.exception, SystemExit), done.exception
    assert said.lower() in " ".join(done.stderr.split()).lower()


def test_another_host_or_a_weak_token_is_not_taken_in_silence(ended: Path) -> None:
    with serving(str(ended), "--host", "0.0.0.0") as dashboard:
        assert "unencrypted" in dashboard.end()[1]
    done = CliRunner(env={"LOCKSTEP_DASHBOARD_TOKEN": "password"}).invoke(app, ["dashboard", str(ended)])
    assert done.exit_code == 2 and "LOCKSTEP_DASHBOARD_TOKEN can be guessed" in " ".join(done.stderr.split())
