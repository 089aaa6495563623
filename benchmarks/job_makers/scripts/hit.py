"""Signals a rank of this job once a file says something: `hit.py SIGNAL RANK FILE PATTERN [WAIT]`.

RANK may be `self:WORD`, a process of the job whose command line has the word.
"""

import os
import re
import signal
import sys
import time
from pathlib import Path

name, who, file, pattern = sys.argv[1:5]
wait = float(sys.argv[5]) if len(sys.argv) > 5 else 0.0
job = os.environ["JOB_OF_CORPUS"]


def processes():
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            env = dict(
                one.split("=", 1) for one in (folder / "environ").read_bytes().decode().split("\0") if "=" in one
            )
            command = (folder / "cmdline").read_bytes().decode().replace("\0", " ")
        except (OSError, UnicodeDecodeError):
            continue
        if env.get("JOB_OF_CORPUS") == job and "hit.py" not in command and int(folder.name) != os.getpid():
            yield int(folder.name), env, command


for _ in range(1200):
    path = Path(file)
    if path.exists() and re.search(pattern, path.read_text(errors="replace")):
        break
    time.sleep(0.1)
time.sleep(wait)
for pid, env, command in sorted(processes(), reverse=True):
    if who.startswith("self:"):
        right = who[5:] in command and "bash" not in command and not command.startswith("timeout")
    else:
        own = env.get("RANK", env.get("SLURM_PROCID")) == who
        right = own and "python" in command and "torchrun" not in command and "multiprocessing" not in command
    if right:
        os.kill(pid, getattr(signal, name))
        break
