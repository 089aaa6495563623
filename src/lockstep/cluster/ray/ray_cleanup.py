"""Ends what a killed process leaves of its private Ray: `python -m lockstep.cluster.ray.ray_cleanup FOLDER PID START`.

The kernel ends Ray's head and raylet with the process that has started them (see `ray_session`). The raylet's two
agents notice that, but report it to the head before they end, and wait a minute for the head, which has ended as well.
So every private Ray has a process of this module, which waits until the process PID with the start time START has
ended.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from lockstep.base import waits
from lockstep.watch.procfs import processes

CHECK_S = 0.5
END_S = 20.0
"""Longest wait for processes that were killed to end."""


def start_cleanup(folder: Path) -> "subprocess.Popen[bytes]":
    """Starts a process that outlives this one, and then ends what is left of the private Ray in the folder."""
    own = os.getpid()
    return subprocess.Popen(
        [sys.executable, "-P", "-m", __name__, str(folder), str(own), str(processes.start_ticks(own))],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd="/",
        start_new_session=True,  # for signals to the process group, of a terminal for one
    )  # fmt: skip


def ray_processes(folder: Path) -> list[int]:
    """Pids of the processes of the private Ray in the folder: those of this user that write to files in the folder, and
    whose title is one of Ray's or whose arguments name the folder. Ray's workers and agents set a title, which
    overwrites their arguments and environment. Another child of a process that uses Ray may have inherited files."""
    found = list[int]()
    for pid in processes.writing_below(folder):
        words = processes.command_line(pid)
        if words and (words[0].startswith("ray::") or any(str(folder) in word for word in words)):
            found.append(pid)
    return found


def end_processes(folder: Path) -> None:
    """Kills the processes of the private Ray in the folder, and waits until they have ended, for `END_S` at most."""
    until = time.monotonic() + END_S
    while (left := ray_processes(folder)) and time.monotonic() < until:
        for pid in left:
            processes.send_signal(pid, processes.start_ticks(pid), signal.SIGKILL)
        waits.sleep(0.05, "killed processes of Ray end")


def main(arguments: Sequence[str] | None = None) -> None:
    """Waits for the end of a process, and ends what is left of its Ray."""
    parser = argparse.ArgumentParser(description="Ends what a killed process leaves of its private Ray.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("pid", type=int)
    parser.add_argument("start", type=int)
    chosen = parser.parse_args(arguments)
    while processes.is_alive(chosen.pid, chosen.start):
        waits.sleep(CHECK_S, "the next check whether the process that started Ray has ended")
    end_processes(chosen.folder)


if __name__ == "__main__":
    main()
