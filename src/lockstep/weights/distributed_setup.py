"""What relays and streams need of torch.distributed: the run's store, a default group, gloo's interface."""

import logging
import os
from datetime import timedelta
from typing import Unpack

import psutil
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore

from lockstep.base import waits
from lockstep.base.wait_state import WaitBounds, WaitTimeout, track_wait
from lockstep.watch.recorder import recorder
from lockstep.weights.errors import LinkFailed


def init_default_group(scope: str) -> None:
    """Starts recording this process's communicators, and makes the default process group that torch requires."""
    recorder.install(keepalive=True, scope=scope)
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)


GLOO_INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"

log = logging.getLogger(__name__)


def use_gloo_interface(address: str) -> None:
    """Makes gloo use the interface with this address, by which other nodes reach this one. If no interface has it (a
    translated address), the variable stays as it is."""
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


def connect_store(host: str, port: int, prefix: str) -> Store:
    """Connects to the run's store. Raises torch.distributed.DistStoreError."""
    with track_wait("store", f"{host}:{port}", "rendezvous store of the run", STORE_CONNECT_S):
        return PrefixStore(prefix, TCPStore(host, port, is_master=False, timeout=timedelta(seconds=STORE_CONNECT_S)))


def wait_for_key(
    store: Store, key: str, link: str, peer: str, waits_for: str | None = None, **bounds: Unpack[WaitBounds]
) -> bytes:
    """The value that `peer` sets under that key. `waits_for` names the process if that differs from the peer. Raises
    LinkFailed if the key does not appear within the bounds."""
    try:
        return waits.store_get(store, key, waits_for=waits_for or peer, why=link, every_s=STORE_POLL_S, **bounds)
    except WaitTimeout as error:
        raise LinkFailed(link, peer, f"{error} (key {key})") from error
