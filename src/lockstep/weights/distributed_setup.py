"""Prepares torch.distributed for relays and streams: the run's store, a default process group, gloo's interface."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Unpack

import psutil
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, Store

from lockstep.base import waits
from lockstep.base.wait_state import WaitBounds, WaitTimeout
from lockstep.cluster.rendezvous_store import RendezvousStoreLost, open_store, store_errors
from lockstep.watch.recorder import recorder
from lockstep.weights.errors import LinkFailed


def init_default_group(scope: str) -> None:
    """Starts recording this process's communicators, and creates the default process group that torch requires."""
    recorder.install(keepalive=True, scope=scope)
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)


GLOO_INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"

log = logging.getLogger(__name__)


def use_gloo_interface(address: str) -> None:
    """Makes gloo use the interface with this address, at which other nodes reach this one. Changes nothing if no
    interface has the address, because of address translation."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address == address for each in addresses):
            os.environ[GLOO_INTERFACE_VARIABLE] = name
            return
    log.warning(
        "no interface has the address %s; gloo uses %s",
        address,
        os.environ.get(GLOO_INTERFACE_VARIABLE, "its default"),
    )


STORE_CONNECT_S = 60.0
STORE_POLL_S = 0.002
"""How often a key of the store is polled."""


def connect_store(url: str, scope: str, link: str) -> Store:
    """Opens a part of the run's store for a link. Raises LinkFailed if the store cannot be reached."""
    with store_link_errors(url, link):
        return open_store(url, scope, STORE_CONNECT_S)


@contextmanager
def store_link_errors(url: str, link: str) -> Iterator[None]:
    """Raises LinkFailed, which names the store, if the store is lost within the context. A later transfer connects
    again."""
    try:
        with store_errors(url):
            yield
    except RendezvousStoreLost as error:
        raise LinkFailed(link, "the run's rendezvous store", error.problem) from error


def wait_for_key(
    store: Store, key: str, link: str, peer: str, waits_for: str | None = None, **bounds: Unpack[WaitBounds]
) -> bytes:
    """Waits for a key that `peer` sets, and returns its value. `waits_for` is the name of the process if that differs
    from `peer`. Raises LinkFailed if the key is not set in time."""
    try:
        return waits.store_get(store, key, waits_for=waits_for or peer, why=link, every_s=STORE_POLL_S, **bounds)
    except WaitTimeout as error:
        raise LinkFailed(link, peer, f"{error} (key {key})") from error
