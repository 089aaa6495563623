"""Whether the Hugging Face hub can be reached. Its libraries repeat requests for a minute before they say that it
cannot."""

import os
import socket
from collections.abc import Mapping
from functools import lru_cache
from urllib.parse import urlsplit, urlunsplit
from urllib.request import getproxies, proxy_bypass

from lockstep.base import waits
from lockstep.base.network import check_reachable
from lockstep.base.wait_state import WaitTimeout

CONNECT_LIMIT_S = 5.0
"""Looking up the hub's name and connecting to it must not take longer together."""
DEFAULT_ENDPOINT = "https://huggingface.co"
REMEDY = (
    "check the network, set HF_ENDPOINT to a mirror, or give a local path (with HF_HUB_OFFLINE=1 only this machine's "
    "cache is used)"
)
_YES = {"1", "ON", "YES", "TRUE"}


def hub_problem(environment: Mapping[str, str] = os.environ) -> str:
    """Returns why the hub cannot be reached, as a clause; empty if it can, or if `HF_HUB_OFFLINE` is set."""
    if any(environment.get(name, "").upper() in _YES for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")):
        return ""
    endpoint = environment.get("HF_ENDPOINT", "").rstrip("/") or DEFAULT_ENDPOINT
    return _connection_problem(endpoint)


@lru_cache(maxsize=4)
def _connection_problem(endpoint: str) -> str:
    """Connects to the server once, or to the proxy that leads to it."""
    address, through = urlsplit(endpoint), ""
    proxies = getproxies()
    proxy = proxies.get(address.scheme) or proxies.get("all")
    if proxy and not proxy_bypass(address.netloc):
        address, through = urlsplit(proxy if "//" in proxy else f"http://{proxy}"), " through the proxy"
    host, port = address.hostname or "", address.port or (443 if address.scheme == "https" else 80)
    connecting = waits.run_in_thread(
        lambda: check_reachable(host, port, "finding out whether the hub can be reached", CONNECT_LIMIT_S),
        name="hub connection",
    )
    try:
        waits.future(connecting, waits_for=host, why="connecting to the hub", timeout_s=CONNECT_LIMIT_S + 1)
    except (OSError, WaitTimeout) as error:
        reason = f"no answer within {CONNECT_LIMIT_S:.0f} s" if isinstance(error, WaitTimeout | TimeoutError) else ""
        if isinstance(error, socket.gaierror):
            reason = f"the name {host} cannot be looked up"
        reason = reason or getattr(error, "strerror", None) or str(error)
        return f"{_without_password(endpoint)} cannot be reached{through} ({reason})"
    return ""


def _without_password(endpoint: str) -> str:
    """The address without the user and password that it may contain (`https://user:password@mirror`)."""
    address = urlsplit(endpoint)
    return urlunsplit(address._replace(netloc=address.netloc.rpartition("@")[2]))
