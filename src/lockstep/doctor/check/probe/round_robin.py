"""The round-robin schedule in which hosts test each other in pairs, and how many rounds fit into a time limit."""

from collections.abc import Iterator
from dataclasses import dataclass

DIAL_S = 2.0
"""Time limit of one dial: two repeats of a lost SYN (RFC 6298: after 1 s)."""
LANES = 64
"""Maximum number of concurrent dials of a host; more than one only matters if dials hang."""
ALL_PORTS_UP_TO = 64
"""With more hosts than this, every pair tries only one port of the kernel's range besides the named ports; pairs take
turns at these ports."""
SLOT_S = 0.25
"""Seconds of a bandwidth measurement in one direction."""
SHORTEST_SLOT_S = 0.05
REACH_SHARE, MEASURE_SHARE = 0.45, 0.4
"""Shares of the time limit for reachability and for bandwidth; the rest is reserved for joining and judging."""
HEAD_S_PER_PAIR = 2e-6
"""Seconds of the head's own work per pair of hosts."""


def round_robin_rounds(many: int) -> Iterator[list[tuple[int, int]]]:
    """All pairs of 0..many-1, in rounds of disjoint pairs (circle method: one number stays, the others rotate)."""
    size = many + many % 2
    ring = list(range(1, size))
    for _ in range(size - 1 if many > 1 else 0):
        circle = [0, *ring]
        pairs = [(circle[k], circle[size - 1 - k]) for k in range(size // 2)]
        yield [pair for pair in pairs if max(pair) < many]
        ring = ring[-1:] + ring[:-1]


def peers_in_order(many: int, host: int) -> list[int]:
    """The peers of `host` in the order of the rounds; rounds without a peer are left out."""
    size = many + many % 2
    last = size - 1
    if many < 2:
        return []
    found = []
    for number in range(last):
        # The ring at this round: position p (1..last) holds 1 + (p - 1 - number) mod last.
        if host == 0:
            other = 1 + (last - 1 - number) % last
        else:
            position = 1 + (host - 1 + number) % last
            facing = last - position
            other = 0 if facing == 0 else 1 + (facing - 1 - number) % last
        if other < many:
            found.append(other)
    return found


@dataclass(frozen=True, slots=True)
class PairTestBudget:
    """How the time limit is divided for a number of hosts."""

    dial_s: float
    """Time limit of one dial."""
    reach_s: float
    """Time limit of all dials of a host."""
    slots: int
    """Rounds in which bandwidth is measured, one direction after the other."""
    slot_s: float
    """Duration of one direction."""


def pair_test_budget(many: int, ports: int, bound_s: float) -> PairTestBudget:
    """Divides the time limit between reachability and bandwidth.

    All dials end within their share even if every one of them hangs. Bandwidth is measured in as many rounds as fit.
    """
    reach_s = bound_s * REACH_SHARE
    dials = max(1, (many - 1) * ports)
    waves = -(-dials // LANES)
    dial_s = min(DIAL_S, 0.8 * reach_s / waves)
    available_s = max(0.0, (REACH_SHARE + MEASURE_SHARE) * bound_s - reach_s - HEAD_S_PER_PAIR * many**2)
    all_rounds = many - 1 + many % 2 if many > 1 else 0
    # Besides the measurement, every host gets an order and answers it.
    overhead = 0.01 + 1e-4 * many
    slot_s = min(SLOT_S, max(SHORTEST_SLOT_S, available_s / (2 * max(all_rounds, 1)) - overhead))
    slots = min(all_rounds, int(available_s / (2 * (slot_s + overhead))))
    return PairTestBudget(dial_s, reach_s, slots, slot_s)


def measurement_rounds(many: int, slots: int) -> list[list[tuple[int, int]]]:
    """The rounds in which bandwidth is measured: all of them, or `slots` evenly spread ones."""
    every = list(round_robin_rounds(many)) if slots else []
    if slots >= len(every):
        return every
    return [every[k * len(every) // slots] for k in range(slots)]


def ports_of_pair(dialler: int, listener: int, hosts: int, named: int, kernels: int) -> list[int]:
    """Indices of the ports that a host dials on another: first the named ports, then those of the kernel's range."""
    kernel_indices = list(range(named, named + kernels))
    if hosts > ALL_PORTS_UP_TO and kernel_indices:
        kernel_indices = [kernel_indices[(dialler + listener) % len(kernel_indices)]]
    return [*range(named), *kernel_indices]
