"""What relays and streams need of torch.distributed: the run's store, a default group, gloo's interface."""

import logging
import os
from datetime import timedelta
from typing import Unpack

import psutil
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore

from lockstep.base import waits
from lockstep.base.bounded_wait import WaitBounds, WaitTimeout, track_wait
from lockstep.watch.recorder import recorder
from lockstep.weights.errors import LinkFailed


def init_default_group(scope: str) -> None:
    """Once in a process: its communicators are recorded from here on. Torch wants a default one before any other."""
    recorder.install(links=True, scope=scope)
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)


GLOO_INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"

log = logging.getLogger(__name__)


def use_gloo_interface(address: str) -> None:
    """Has gloo use the interface with this address: the one by which the cluster says that other nodes reach this one.
    Where none has it (a translated address), what the variable says stays."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address == address for each in addresses):
            os.environ[GLOO_INTERFACE_VARIABLE] = name
            return
    log.warning(
        "no interface has the address %s; gloo uses %s",
        address,
        os.environ.get(GLOO_INTERFACE_VARIABLE, "its own choice"),
    )


STORE_CONNECT_S = 60.0
STORE_POLL_S = 0.002
"""How often it is looked at what a peer says."""


def connect_store(host: str, port: int, prefix: str) -> Store:
    """The run's store. Raises torch.distributed.DistStoreError."""
    with track_wait("store", f"{host}:{port}", "rendezvous store of the run", STORE_CONNECT_S):
        return PrefixStore(prefix, TCPStore(host, port, is_master=False, timeout=timedelta(seconds=STORE_CONNECT_S)))


def wait_for_key(
    store: Store, key: str, link: str, peer: str, waits_for: str | None = None, **bounds: Unpack[WaitBounds]
) -> bytes:
    """What a peer says under that key; `whom` is the process that is to say it, where that has another
    name. Raises LinkFailed where it does not within the bounds."""
    try:
        return waits.store_get(store, key, waits_for=waits_for or peer, why=link, every_s=STORE_POLL_S, **bounds)
    except WaitTimeout as error:
        raise LinkFailed(link, peer, f"{error} (key {key})") from error
