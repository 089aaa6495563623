"""Which network interfaces stand on a card of this host, as the kernel's /sys/class/net tells."""

from pathlib import Path

NET = Path("/sys/class/net")


def on_card(interface: Path, depth: int = 4) -> bool:
    """Whether a device of the host is this interface, or below it: a port of a bridge, of a bond, what a VLAN is on.

    Args:
        interface: its folder in `NET`.
        depth: how many such steps down are taken.
    """
    if (interface / "device").exists():
        return True
    below = {port.name for port in _entries(interface / "brif")}
    below |= {each.name.removeprefix("lower_") for each in _entries(interface) if each.name.startswith("lower_")}
    return depth > 0 and any(on_card(interface.parent / name, depth - 1) for name in below)


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []
