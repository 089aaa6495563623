"""Gloo binds to the network interface that a variable names: here, to the one that has a node's address."""

import os

import psutil

VARIABLE = "GLOO_SOCKET_IFNAME"


def use_interface(address: str) -> None:
    """Has gloo use the interface with this address, where its user has not named one and some interface has it."""
    if VARIABLE in os.environ:
        return
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address == address for each in addresses):
            os.environ[VARIABLE] = name
            return
