"""`lockstep check --join`: the probe of this host."""

import os
import signal
import socket
import sys
from collections.abc import Mapping
from types import FrameType
from typing import Any

import typer

from lockstep.cli.check_arguments import split_address
from lockstep.cli.errors import show_note
from lockstep.doctor.check.probe import JOIN_S, serve
from lockstep.doctor.check.protocol import TOKEN_VARIABLE


def join(where: str, name: str | None, address: str | None, wait_s: float | None) -> None:
    """Is the probe of this host until the head lets it go.

    Args:
        wait_s: how long the head is tried, when not as usual.

    Raises:
        ValueError: what was given cannot be.
        OSError: the head is not reached or does not take this probe, or this host does not have the address.
    """
    host, port = split_address(where)
    token = os.environ.get(TOKEN_VARIABLE, "")
    if not token:
        if not sys.stdin.isatty():
            raise ValueError(f"there is no token: set {TOKEN_VARIABLE} to the one that the check on the head printed")
        token = str(typer.prompt("token of the check", hide_input=True)).strip()
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup leaves it
            signal.signal(number, _leave)
    serve(host, port, token, name or socket.gethostname(), address, _look, wait_s or JOIN_S, show_note)


def _look(order: Mapping[str, Any]) -> dict[str, Any]:
    from lockstep.doctor.check.others import answer_look

    return answer_look(order)


def _leave(number: int, frame: FrameType | None) -> None:
    """In order: ranks of a self-test are ended on the way."""
    raise SystemExit(128 + number)
