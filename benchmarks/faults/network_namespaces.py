"""Network namespaces as hosts, with links that can be cut. They need root and iproute2."""

import os
import secrets
import shutil
import subprocess
from functools import cache
from types import TracebackType
from typing import Self


@cache
def why_no_namespaces() -> str:
    """Why this process cannot create network namespaces; empty if it can."""
    if os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("unshare") is None:
        return "they need root, iproute2 and util-linux"
    done = subprocess.run(["unshare", "--net", "true"], capture_output=True, text=True, timeout=20, check=False)
    return done.stderr.strip() if done.returncode else ""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=20)


def add_namespace(name: str) -> None:
    """Create a namespace."""
    ip("netns", "add", name)


def _to(ports: tuple[int, int]) -> list[str]:
    return ["ipproto", "tcp", "dport", f"{ports[0]}-{ports[1]}"]


class Cable:
    """A link from this network (interface `near`) to a new namespace (interface `far`).

    Args:
        name: of the namespace, at most 14 letters.
        here, there: addresses of the two ends, in one /24.
    """

    def __init__(self, name: str, here: str, there: str) -> None:
        self.name, self.here, self.there = name, here, there
        self.near, self.far = f"{name}a", f"{name}b"
        self.inside = ["ip", "netns", "exec", name]
        """Prefix of commands that run in the namespace."""

    @classmethod
    def any(cls, prefix: str, network: str) -> Self:
        """A link that no other test uses at the same time, in a subnet of `network` (`10.77`)."""
        subnet = f"{network}.{secrets.randbelow(250) + 1}"
        return cls(f"{prefix}{secrets.token_hex(3)}", f"{subnet}.1", f"{subnet}.2")

    def lay(self) -> None:
        """Create the namespace and the link."""
        add_namespace(self.name)
        ip("link", "add", self.near, "type", "veth", "peer", "name", self.far, "netns", self.name)
        ip("addr", "add", f"{self.here}/24", "dev", self.near)
        ip("-n", self.name, "addr", "add", f"{self.there}/24", "dev", self.far)
        for device in (self.far, "lo"):
            ip("-n", self.name, "link", "set", device, "up")
        self.mend()

    def cut(self) -> None:
        ip("link", "set", self.near, "down")

    def mend(self) -> None:
        ip("link", "set", self.near, "up")

    def refuse_out(self, ports: tuple[int, int]) -> None:
        """Reject connections from the namespace to these ports elsewhere, as a firewall with a reply does."""
        ip("-n", self.name, "rule", "add", "iif", "lo", *_to(ports), "unreachable")

    def drop_in(self, ports: tuple[int, int]) -> None:
        """Drop packets that arrive in the namespace for these ports, as a silent firewall does."""
        ip("-n", self.name, "rule", "add", "pref", "100", "lookup", "local")
        ip("-n", self.name, "rule", "del", "pref", "0")
        ip("-n", self.name, "rule", "add", "pref", "50", "iif", self.far, *_to(ports), "blackhole")

    def remove(self) -> None:
        """Remove the namespace and the link, as far as they exist."""
        for words in (["link", "del", self.near], ["netns", "del", self.name]):
            subprocess.run(["ip", *words], capture_output=True, timeout=20, check=False)

    def __enter__(self) -> Self:
        try:
            self.lay()
        except BaseException:
            self.remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.remove()
