"""Stands in for pdsh and ssh: runs a command once per host on this machine, each line with its host before it."""

import re
import shlex
import subprocess
import sys
import threading
from pathlib import Path

UNREACHABLE = Path("unreachable")


def show(host, pipe, target):
    for line in iter(pipe.readline, ""):
        print(f"{host}: {line}", end="", file=target, flush=True)


def main():
    if Path(sys.argv[0]).name == "ssh":
        host, command = sys.argv[-2], sys.argv[-1]
        if UNREACHABLE.exists() and host in UNREACHABLE.read_text().split():
            print(f"ssh: connect to host {host} port 22: Connection refused", file=sys.stderr)
            return 255
        return subprocess.run(["bash", "-c", command]).returncode
    at = sys.argv.index("-w")
    hosts, rest = sys.argv[at + 1].split(","), sys.argv[at + 2 :]
    command = " ".join(each if ";" in each or each.startswith("%") else shlex.quote(each) for each in rest)
    if command.startswith(("'pkill", "pkill")):
        return 0
    running, worst = [], 0
    for number, host in enumerate(hosts):
        if UNREACHABLE.exists() and host in UNREACHABLE.read_text().split():
            print(f"{host}: ssh: connect to host {host} port 22: Connection refused", file=sys.stderr)
            print(f"pdsh@head-1: {host}: ssh exited with exit code 255", file=sys.stderr, flush=True)
            worst = 255
            continue
        one = subprocess.Popen(
            ["bash", "-c", re.sub("%n", str(number), command)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        threads = [
            threading.Thread(target=show, args=(host, pipe, target))
            for pipe, target in ((one.stdout, sys.stdout), (one.stderr, sys.stderr))
        ]
        for each in threads:
            each.start()
        running.append((host, one, threads))
    for host, one, threads in running:
        for each in threads:
            each.join()
        if code := one.wait():
            print(f"pdsh@head-1: {host}: ssh exited with exit code {code % 256}", file=sys.stderr, flush=True)
            worst = max(worst, code % 256)
    return worst


if __name__ == "__main__":
    sys.exit(main())
