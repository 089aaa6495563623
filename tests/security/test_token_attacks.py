"""Attacks on the token of a run: guessing it from what other users can see, weak tokens, files that others can read."""

import base64
import contextlib
import hashlib
import hmac
import itertools
import os
import secrets
import signal
import stat
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from lockstep.base.folders import shm_root
from lockstep.base.transport.run_token import (
    MIN_BITS,
    TOKEN_COMMAND,
    WeakToken,
    check_token,
    estimated_bits,
    new_run_token,
    shared_token,
    token_path,
    uses_tls,
)
from lockstep.cluster.local_cluster import LocalCluster
from lockstep.cluster.protocol import WorkerSpec
from lockstep.config.cluster import LocalClusterConfig

LOCKSTEP = [sys.executable, "-m", "lockstep"]
TOKEN = "8f3e0a6d5b1c49d2a7e6f0b4c3d81927"
DECOYS = ("password", "lockstep", "123456", "changeme", "cluster-2026")
SHORTEST = 8
"""Characters of a digest that are enough to recognise it."""


def visible_to_others(roots: list[Path]) -> Iterator[str]:
    """What another user sees: command lines and names of processes, names of files in folders that others may list, and
    contents of files that others may read."""
    for process in psutil.process_iter(["cmdline", "name"]):
        yield f"{process.info['name']} {' '.join(process.info['cmdline'] or ())}"
    pending = [root for root in roots if root.is_dir()]
    while pending:
        folder = pending.pop()
        mode = folder.stat().st_mode
        for path in folder.iterdir() if mode & stat.S_IROTH and mode & stat.S_IXOTH else ():
            yield path.name
            with contextlib.suppress(OSError):
                facts = path.lstat()
                if stat.S_ISDIR(facts.st_mode):
                    pending.append(path)
                elif stat.S_ISREG(facts.st_mode) and facts.st_mode & stat.S_IROTH and facts.st_size < 1 << 20:
                    yield path.read_bytes().decode("latin-1")


def derived_from(token: str, *known: str) -> Iterator[str]:
    """Digests of a token, alone and together with what an attacker knows, in the usual spellings."""
    parts = [token, *(f"{a}{between}{b}" for each in known for between in ("", " ", ":", "-", "/", "\0", "\n")
                      for a, b in ((token, each), (each, token)))]  # fmt: skip
    for text, name in itertools.product(parts, ("md5", "sha1", "sha256", "sha512", "blake2b", "blake2s")):
        yield from spelled(hashlib.new(name, text.encode()).digest())
    for each, name in itertools.product((*known, "", "lockstep"), ("sha256", "sha512", "blake2b")):
        yield from spelled(hmac.digest(token.encode(), each.encode(), name))
        yield from spelled(hmac.digest(each.encode(), token.encode(), name))


def spelled(digest: bytes) -> Iterator[str]:
    yield digest.hex()[:SHORTEST]
    yield base64.b64encode(digest).decode()[:SHORTEST]
    yield base64.urlsafe_b64encode(digest).decode()[:SHORTEST]
    yield base64.b32encode(digest).decode()[:SHORTEST]
    yield str(int.from_bytes(digest[:8], "big"))[:12]


def guessed(seen: str, *known: str) -> list[str]:
    """The tokens of a dictionary of which something in `seen` is derived."""
    assert TOKEN not in seen
    return [word for word in (*DECOYS, TOKEN) if any(each in seen for each in derived_from(word, *known))]


def until(check: object, what: str, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not check():  # type: ignore[operator]
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.05)


def free_port() -> int:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def watched(folder: Path, port: int, *words: str, **variables: str) -> Iterator["subprocess.Popen[str]"]:
    """`lockstep watch --supervisor` around a command that sleeps."""
    environment = {**os.environ, "HOME": str(folder), "LOCKSTEP_BEACONS": str(folder / "shm"), **variables}
    (folder / "shm").mkdir(mode=0o755, exist_ok=True)
    command = [*LOCKSTEP, "watch", "--supervisor", f"127.0.0.1:{port}", *words, "--", "sleep", "300"]
    process = subprocess.Popen(command, env=environment, cwd=folder, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)


def listening(port: int) -> bool:
    return any(each.laddr.port == port for each in psutil.net_connections("tcp4") if each.status == psutil.CONN_LISTEN)


def test_the_token_of_a_watched_job_cannot_be_guessed_from_what_others_see(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    port = free_port()
    with watched(tmp_path, port, LOCKSTEP_TOKEN=TOKEN):
        until(lambda: listening(port), "the supervisor listens")
        until(lambda: list((tmp_path / "shm").iterdir()), "the run has a folder")
        seen = "\n".join(visible_to_others([tmp_path, shm_root(), *Path("/tmp").glob("*lockstep*")]))
    assert "lockstep watch --supervisor" in seen and "--run sleep-" in seen, "the attacker sees the job"
    assert guessed(seen, str(port), f"127.0.0.1:{port}", "127.0.0.1") == []


def test_the_attack_would_find_a_digest() -> None:
    """As an earlier version put it into the name of a folder."""
    name = f"watch-{hashlib.sha256(f'29477 {TOKEN}'.encode()).hexdigest()[:12]}"
    assert guessed(f"sleep-12ab34\n{name}\nother", "29477") == [TOKEN]


SERVICE = """
class Service:
    def pid(self) -> int:
        import os
        return os.getpid()
"""


def test_the_token_of_a_run_cannot_be_guessed_from_what_others_see(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "seen_service.py").write_text(SERVICE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    run, folder = f"guess-{secrets.token_hex(3)}", tmp_path / "run"
    with LocalCluster(LocalClusterConfig(), run, folder, 1, TOKEN) as cluster:
        cluster.start([WorkerSpec("w", "w", 0, "seen_service:Service")])
        seen = "\n".join(visible_to_others([tmp_path, shm_root(), *Path("/tmp").glob("*lockstep*")]))
        controller, port = cluster._server.address
    assert run in seen, "the attacker sees the run"
    assert guessed(seen, run, str(port), f"{controller}:{port}", f"{run} 1") == []


@pytest.mark.parametrize(
    "token",
    [
        "", "short", "password", "password1234567890", "0" * 64, "0123456789abcdef" * 4, "deadbeef" * 8, "abcd" * 16,
        "the-secret-of-the-two-nodes", "correct horse battery staple", "lockstep-cluster-token-2024-production",
        "my-secret-token-for-the-cluster-1234567890", "20261123" * 4, "qwertyuiopasdfghjklzxcvbnm1234567890",
        "Tr0ub4dor&3-Tr0ub4dor&3-Tr0ub4dor&3", "p4ssw0rd-0f-th3-t34m-2026", "tls:password", "3127726d7f70d089",
    ],
)  # fmt: skip
def test_tokens_that_can_be_guessed_are_refused(token: str) -> None:
    with pytest.raises(WeakToken) as refused:
        check_token(token)
    assert token not in str(refused.value) or not token, "the message may be logged"
    assert TOKEN_COMMAND in str(refused.value) and refused.value.bits < MIN_BITS


def test_random_tokens_of_the_usual_makers_are_accepted() -> None:
    for _ in range(300):
        for token in (
            new_run_token(), new_run_token(tls=True), secrets.token_hex(16), str(uuid.uuid4()),
            base64.b64encode(secrets.token_bytes(48)).decode(), secrets.token_urlsafe(48),
        ):  # fmt: skip
            assert check_token(token) == token, (token, estimated_bits(token))
    assert uses_tls(new_run_token(tls=True)) and not uses_tls(new_run_token())


def test_a_weak_token_is_refused_before_anything_starts_and_the_remedy_works(tmp_path: Path) -> None:
    words = [*LOCKSTEP, "watch", "--supervisor", f"127.0.0.1:{free_port()}", "--", "echo", "started"]
    environment = {**os.environ, "HOME": str(tmp_path), "LOCKSTEP_TOKEN": "the-secret-of-the-two-nodes"}
    refused = subprocess.run(words, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "LOCKSTEP_TOKEN can be guessed" in refused.stderr and "the-secret" not in refused.stderr
    remedy = refused.stderr.partition("Make a random one: ")[2].strip()
    assert remedy.startswith("export LOCKSTEP_TOKEN=$(")
    done = subprocess.run(
        ["bash", "-c", f'{remedy}; exec "$@"', "-", *words],
        env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "started\n"), done.stderr


def test_a_token_is_made_where_there_is_none_and_is_private(tmp_path: Path) -> None:
    token_path(tmp_path).parent.mkdir(mode=0o755)
    with ThreadPoolExecutor(8) as pool:
        tokens = list(pool.map(lambda _: shared_token({}, tmp_path), range(8)))
    assert len(set(tokens)) == 1 and estimated_bits(tokens[0]) > 200
    path = token_path(tmp_path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert [each.name for each in path.parent.iterdir()] == ["token"]
    assert shared_token({"LOCKSTEP_TOKEN": TOKEN}, tmp_path) == TOKEN


@pytest.mark.parametrize("how", ["readable", "link", "weak"])
def test_a_token_that_others_could_know_is_not_used(tmp_path: Path, how: str) -> None:
    path = token_path(tmp_path)
    path.parent.mkdir(mode=0o755)
    target = tmp_path / "elsewhere" if how == "link" else path
    target.write_text("lockstep\n" if how == "weak" else f"{TOKEN}\n")
    target.chmod(0o644 if how == "readable" else 0o600)
    if how == "link":
        path.symlink_to(target)
    with pytest.raises(WeakToken if how == "weak" else PermissionError, match=str(path)):
        shared_token({}, tmp_path)


def test_nodes_that_share_a_home_folder_need_no_variable(tmp_path: Path) -> None:
    """And none of them shows the token that was made."""
    port = free_port()
    without = {name: value for name, value in os.environ.items() if name != "LOCKSTEP_TOKEN"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "environ", without)
        with watched(tmp_path, port, "--tls", "--node", "a"):
            until(lambda: listening(port), "the supervisor listens")
            token = token_path(tmp_path).read_text().strip()
            assert not any(token in line for line in visible_to_others([tmp_path]))
            log = tmp_path / "second.log"
            second = subprocess.run(
                [*LOCKSTEP, "watch", "--supervisor", f"127.0.0.1:{port}", "--tls", "--node", "b", "--", "sleep", "3"],
                env={**without, "HOME": str(tmp_path), "LOCKSTEP_BEACONS": str(tmp_path / "shm")},
                cwd=tmp_path, stderr=log.open("w"), timeout=120,
            )  # fmt: skip
    assert second.returncode == 0 and log.read_text() == ""
