"""Where processes listen and who is dialled, and folders in places where anybody may write."""

import errno
import os
import socket
from pathlib import Path

import pytest

from lockstep.base.folders import make_private_dir
from lockstep.base.network import NoFreePort, check_reachable, listen


def free(count: int) -> tuple[int, int]:
    """A range of that many ports of which none is in use."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as trial:
            first = trial.getsockname()[1]
        try:
            for port in range(first, first + count):
                socket.create_server(("127.0.0.1", port)).close()
        except (OSError, OverflowError):
            continue
        return first, first + count - 1


def test_the_first_free_port_of_a_range() -> None:
    first, last = free(2)
    with listen("127.0.0.1", (first, last)) as one, listen("127.0.0.1", (first, last)) as two:
        assert [each.getsockname() for each in (one, two)] == [("127.0.0.1", first), ("127.0.0.1", last)]
        with pytest.raises(NoFreePort, match=f"all ports from {first} to {last} of 127.0.0.1 are in use"):
            listen("127.0.0.1", (first, last))
        with pytest.raises(OSError) as caught:
            listen("127.0.0.1", (last, last))
        assert caught.value.errno == errno.EADDRINUSE
    with listen("127.0.0.1", (first, last)) as again:
        assert again.getsockname()[1] == first


def test_any_port_of_an_address_of_either_kind() -> None:
    for host in ("127.0.0.1", "::1"):
        with listen(host) as listening:
            port = listening.getsockname()[1]
            check_reachable(host, port, "a test", 5.0)
        with pytest.raises(ConnectionRefusedError):
            check_reachable(host, port, "a test", 5.0)


def test_an_address_that_does_not_answer_is_given_up() -> None:
    with socket.socket() as full:  # its queue takes one, and nobody takes it out
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        with socket.create_connection(full.getsockname()), pytest.raises(TimeoutError):
            for _ in range(8):
                check_reachable(*full.getsockname(), "a test", 0.2)


def test_a_folder_where_anybody_may_write_is_ones_own(tmp_path: Path) -> None:
    own = make_private_dir(tmp_path / "own", "choose another")
    assert own.stat().st_mode & 0o777 == 0o700
    own.chmod(0o755)
    assert make_private_dir(own, "choose another").stat().st_mode & 0o777 == 0o700
    (tmp_path / "link").symlink_to(own)
    (tmp_path / "file").touch()
    for name in ("link", "file"):
        with pytest.raises(PermissionError, match=f"{name} is no folder.*: choose another"):
            make_private_dir(tmp_path / name, "choose another")
    if os.geteuid() == 0:
        os.chown(own, 1, 1)
        with pytest.raises(PermissionError, match="belongs to uid 1, not to 0: choose another"):
            make_private_dir(own, "choose another")
