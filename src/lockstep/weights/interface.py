"""Gloo binds to the network interface that a variable names: here, to the one that has a node's address."""

import logging
import os

import psutil

VARIABLE = "GLOO_SOCKET_IFNAME"

log = logging.getLogger(__name__)


def use_interface(address: str) -> None:
    """Has gloo use the interface with this address: the one by which the cluster says that other nodes reach this one.
    Where none has it (a translated address), what the variable says stays."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address == address for each in addresses):
            os.environ[VARIABLE] = name
            return
    log.warning("no interface has the address %s; gloo uses %s", address, os.environ.get(VARIABLE, "its own choice"))
