"""Starting a node agent."""

import contextlib
import os
import subprocess
import sys
import threading
from pathlib import Path

from lockstep.watch import waits
from lockstep.watch.agent_client import Address, AgentError
from lockstep.watch.ports import Ports


def start_agent(
    run: str, token: str, folder: Path, *, generation: int = 1, orphan_grace_s: float = 0.0,
    kill_grace_s: float = 2.0, timeout_s: float = 60.0, host: str = "127.0.0.1", node: str = "",
    controller: int | None = 0, ports: Ports | None = None,
) -> Address:  # fmt: skip
    """Starts an agent in a session of its own; its output goes to `folder/agent.log`. `controller` is the pid of its
    controller, 0 for this process, or None where that is on another host. Raises AgentError when it does not come
    up."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "agent.json").unlink(missing_ok=True)
    whose = [] if controller is None else ["--controller", str(controller or os.getpid())]
    argv = [
        sys.executable, "-m", "lockstep.watch.agent", "--run", run, "--generation", str(generation),
        "--folder", str(folder), *whose, "--orphan-grace", str(orphan_grace_s),
        "--kill-grace", str(kill_grace_s), "--host", host, *(["--node", node] if node else []),
        *(["--ports", *map(str, ports)] if ports else []),
    ]  # fmt: skip
    with (folder / "agent.log").open("ab") as output:
        popen = subprocess.Popen(
            argv, env={**os.environ, "LOCKSTEP_TOKEN": token}, stdin=subprocess.DEVNULL, stdout=output,
            stderr=output, start_new_session=True,
        )  # fmt: skip

    # its own thread waits for it, so that it never stays behind as a zombie
    threading.Thread(target=popen.wait, name="agent-reaper", daemon=True).start()

    def up() -> Address | None:
        if popen.poll() is not None:
            said = (folder / "agent.log").read_text(errors="replace")[-2000:]
            raise AgentError("start", f"the agent ended with {popen.returncode}\n{said}")
        with contextlib.suppress(FileNotFoundError):
            return Address.read(folder)
        return None

    try:
        return waits.poll(up, kind="process", whom="agent", why="its address", timeout_s=timeout_s)
    except BaseException:
        popen.kill()
        raise
