"""`lockstep check --join`: runs as this host's probe, without the modules that only the head needs."""

import os
import signal
import socket
import sys
from collections.abc import Mapping
from types import FrameType
from typing import Any

import typer

from lockstep.doctor.check.probe.host_probe import JOIN_TIMEOUT_S, serve_probe
from lockstep.doctor.check.probe.probe_protocol import TOKEN_VARIABLE
from lockstep.report.command_events import TERMINAL, CommandEvents


def run_probe(
    where: str, name: str | None, address: str | None, wait_s: float | None, events: CommandEvents = TERMINAL
) -> None:
    """Runs as this host's probe until the head of the check dismisses it.

    Args:
        wait_s: how long to try to reach the head; None means the default.

    Raises:
        ValueError: an argument is invalid.
        OSError: the head cannot be reached or refuses this probe, or this host does not have the address.
    """
    host, port = _split_address(where)
    token = os.environ.get(TOKEN_VARIABLE, "")
    if not token:
        if not sys.stdin.isatty():
            raise ValueError(f"no token: set {TOKEN_VARIABLE} to the token that the check printed")
        token = str(typer.prompt("token of the check", hide_input=True)).strip()
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup lets the process ignore SIGHUP
            signal.signal(number, _exit_on_signal)
    own, bound_s = name or socket.gethostname(), wait_s or JOIN_TIMEOUT_S
    serve_probe(host, port, token, own, address, _gather_facts, bound_s, events.note)


def _split_address(where: str) -> tuple[str, int]:
    """Parses `HOST:PORT` or `[IPv6]:PORT`. Raises ValueError."""
    host, colon, port = where.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"--join {where}: expected HOST:PORT, as the check on the other host printed it")
    return host, int(port)


def _gather_facts(order: Mapping[str, Any]) -> dict[str, Any]:
    from lockstep.doctor.check.cluster.host_comparison import answer_facts_order

    return answer_facts_order(order)


def _exit_on_signal(number: int, frame: FrameType | None) -> None:
    """Raises SystemExit, so that the probe ends the ranks of a self-test before it exits."""
    raise SystemExit(128 + number)
