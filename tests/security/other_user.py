"""Another user of the host, who prepares folders that a user of Lockstep meets. Needs root, to become that user."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ATTACKER, VICTIM = 65534, 40001
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="becomes other users, which only root can")


def error_as_user(uid: int, action: Callable[[], object]) -> str:
    """Does something as another user, in a child of this process. Returns the exception that it raised, as text."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        text = ""
        try:
            os.setgroups([])
            os.setgid(uid)
            os.setuid(uid)
            action()
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        finally:
            os.write(writing, text.encode())
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        text = pipe.read().decode()
    os.waitpid(child, 0)
    return text


def plant(script: str, *arguments: str | Path, uid: int = ATTACKER) -> None:
    """Runs a shell script as the attacker, which has to succeed."""
    done = subprocess.run(
        ["sh", "-euc", script, "sh", *map(str, arguments)], user=uid, group=uid, extra_groups=[], cwd="/", text=True,
        capture_output=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@contextmanager
def public_folder(mode: int = 0o1777) -> Iterator[Path]:
    """A folder like `/tmp`, which all users see."""
    folder = Path(tempfile.mkdtemp(prefix="public-"))
    folder.chmod(mode)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
