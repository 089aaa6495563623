"""Weights between two network namespaces, as between hosts: over the address of the link, and when it is cut."""

import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from torch._C._distributed_c10d import TCPStore

sys.path.insert(0, str(Path(__file__).parents[1] / "contract"))
from weight_nodes import House

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None, reason="network namespaces need root and iproute2"
)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=10)


@pytest.fixture
def link() -> Iterator[tuple[str, str, str]]:
    """Name of a namespace, and the addresses of this side and that one."""
    name, number = f"lh{secrets.token_hex(3)}", secrets.randbelow(250) + 1
    here, there = f"10.81.{number}.1", f"10.81.{number}.2"
    try:
        ip("netns", "add", name)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespaces here: {error.stderr.decode()}")
    try:
        ip("link", "add", f"{name}a", "type", "veth", "peer", "name", f"{name}b", "netns", name)
        ip("addr", "add", f"{here}/24", "dev", f"{name}a")
        ip("link", "set", f"{name}a", "up")
        ip("-n", name, "addr", "add", f"{there}/24", "dev", f"{name}b")
        ip("-n", name, "link", "set", f"{name}b", "up")
        ip("-n", name, "link", "set", "lo", "up")
        yield name, here, there
    finally:
        subprocess.run(["ip", "link", "del", f"{name}a"], capture_output=True, timeout=10, check=False)
        ip("netns", "del", name)


def test_a_link_that_is_cut_in_mid_transfer(tmp_path: Path, link: tuple[str, str, str]) -> None:
    name, here, there = link
    store = TCPStore(here, 0, None, True, timedelta(seconds=60), wait_for_workers=False)
    house = House(
        tmp_path / "run", "gloo", ["a"], ["b", "a"], limit_s=3.0, bucket=20_000,
        addresses={"a": here, "b": there}, spaces={"b": name}, store=(here, store.port),
    )  # fmt: skip
    try:
        house.lay_out()
        assert house.publish(0) == [True, True]
        house.check(0)
        began = time.monotonic()
        assert house.caught("b", 1, lambda _: ip("link", "set", f"{name}a", "down")) == [False, True]
        assert time.monotonic() - began < 30
        house.check(1, 1)
        ip("link", "set", f"{name}a", "up")
        house.fetch(0, 1)
        house.check(1)
        assert house.publish(2) == [True, True]
    finally:
        house.close()
