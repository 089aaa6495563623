"""An agent and its fork server that are forked from the controller: real processes, in a controller of their own."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from lockstep.base.folders import new_run_id, run_shm_dir

CONTROLLER = """
import json, os, sys, time
from pathlib import Path
import numpy
from lockstep.base.errors import ForkedWorker
from lockstep.watch.agent.agent_client import AgentClient, start_agent
from lockstep.watch.agent.prepared_agent import prepare_agent

def say(**values):
    print(json.dumps(values), flush=True)

def main(run, folder, what):
    sys.path.insert(0, "only-the-controller-has-this")
    del sys.path[0]
    print("buffered, and written once ", end="")
    agent = prepare_agent(("json", "numpy"))
    say(agent=agent.pid, server=agent.fork_server.pid)
    if what == "discard":
        sys.stdin.readline()
        agent.discard()
        time.sleep(600)
    if what == "die":
        time.sleep(600)
    token = "5f0c2b7be4a8913d6e7f20c1a9d84b36"
    client = AgentClient(start_agent(run, token, folder, kill_grace_s=0.5, prepared=agent), token)
    for name, env in (("facts", {}), ("exit", {}), ("raise", {}), ("other", {"OMP_NUM_THREADS": "7"}), ("stay", {})):
        pid = client.spawn(name, [sys.executable, str(folder / "work.py"), name], log_path=folder / f"{name}.log",
                           env={**os.environ, **env}, preload=("json", "numpy"), cwd=folder)
        end = None if name == "stay" else client.wait_exit(name, "the test", 30).exit_code
        say(name=name, pid=pid, code=end, parent=os.getpid())
    say(warm={facts.name: facts.warm for facts in client.list()})
    if what == "server":
        os.kill(agent.fork_server.pid, 9)
        client.spawn("later", [sys.executable, str(folder / "work.py"), "exit"], log_path=folder / "later.log",
                     preload=("json", "numpy"), cwd=folder)
        say(code=client.wait_exit("later", "the test", 30).exit_code)
    if what == "controller":
        time.sleep(600)
    say(remaining=client.shut_down(0.2))

try:
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
except ForkedWorker as worker:
    work = worker.run
else:
    sys.exit()
work()
"""

WORKER = """
import json, os, signal, sys, time, traceback
import numpy
what = sys.argv[1]
if what == "facts":
    print(json.dumps({
        "ppid": os.getppid(), "sid": os.getsid(0) == os.getpid(), "argv": sys.argv, "name": __name__,
        "cwd": os.getcwd(), "path0": sys.path[0], "stack": [frame.name for frame in traceback.extract_stack()],
        "random": float(numpy.random.random()), "sigint": int(signal.getsignal(signal.SIGINT)),
        "sockets": [kind for kind in map(os.readlink, (f"/proc/self/fd/{n}" for n in os.listdir("/proc/self/fd")
                    if os.path.exists(f"/proc/self/fd/{n}"))) if "socket" in kind],
    }))
elif what == "exit":
    sys.exit(7)
elif what == "raise":
    raise ValueError("the reason")
elif what == "other":
    print(os.environ["OMP_NUM_THREADS"])
elif what == "stay":
    print("up", flush=True); time.sleep(600)
"""


class Controller:
    """A process that runs CONTROLLER."""

    def __init__(self, folder: Path, run: str, what: str) -> None:
        (folder / "work.py").write_text(WORKER)
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, "-c", CONTROLLER, run, str(folder), what], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        first = self.line()
        assert first.pop("before", "") == "buffered, and written once "
        self.agent, self.server = psutil.Process(first["agent"]), psutil.Process(first["server"])

    def line(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        text = self.process.stdout.readline()
        before, brace, rest = text.partition("{")
        return json.loads(brace + rest) | ({"before": before} if before else {})

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Callable[[str], Controller]]:
    run, begun = new_run_id("prepared"), list[Controller]()

    def start(what: str) -> Controller:
        begun.append(Controller(tmp_path, run, what))
        return begun[-1]

    yield start
    for each in begun:
        each.process.kill()
        each.process.wait(10)
        gone(each.agent, each.server)
    assert not run_shm_dir(run).exists()


def gone(*processes: psutil.Process) -> None:
    deadline = time.monotonic() + 10
    for process in processes:
        while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline, f"{process} still runs"
            time.sleep(0.02)


def test_workers_are_like_those_of_a_fork_server_that_imports_anew(begin: Callable[[str], Controller]) -> None:
    controller = begin("server")
    facts, left, raised, other, stay = (controller.line() for _ in range(5))
    assert [each["code"] for each in (facts, left, raised, other, stay)] == [0, 7, 1, 0, None]
    known = json.loads(controller.log("facts"))
    assert known.pop("ppid") == controller.agent.pid and known.pop("random") != 0
    assert "main" not in known.pop("stack")[1:3], "the controller's stack is left before the worker runs"
    folder = controller.folder
    assert known == {
        "sid": True, "argv": [str(folder / "work.py"), "facts"], "name": "__main__", "cwd": str(folder),
        "path0": str(folder), "sigint": int(signal.SIG_IGN), "sockets": [],
    }  # fmt: skip
    assert controller.log("raise").count("Traceback") == 1 and "ValueError: the reason" in controller.log("raise")
    assert controller.log("other") == "7\n", "it differs in a variable that modules read, so it has another fork server"
    assert controller.line() == {"warm": dict.fromkeys(("facts", "exit", "raise", "other", "stay"), True)}
    assert controller.line() == {"code": 7}, "a killed fork server is replaced"
    assert controller.line() == {"remaining": []}
    assert controller.process.wait(10) == 0
    gone(controller.agent)


@pytest.mark.parametrize("what", ["discard", "die"])
def test_nothing_remains_if_no_agent_is_started(begin: Callable[[str], Controller], what: str) -> None:
    controller = begin(what)
    if what == "discard":
        assert controller.process.stdin is not None
        controller.process.stdin.close()
    else:
        assert controller.agent.is_running() and controller.server.is_running()
        controller.process.kill()
    gone(controller.server, controller.agent)


def test_a_killed_controller_leaves_nothing(begin: Callable[[str], Controller]) -> None:
    controller = begin("controller")
    lines = [controller.line() for _ in range(6)]
    stay = psutil.Process(lines[4]["pid"])
    os.kill(controller.process.pid, signal.SIGKILL)
    gone(stay, controller.server, controller.agent)
