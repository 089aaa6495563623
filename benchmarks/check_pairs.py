"""The time that `lockstep check` needs to test every pair of many hosts: the real schedule on simulated links, in
virtual time.

    python -m benchmarks.check_pairs [HOSTS ...]

The cost of a dial is first measured on this machine, on one port of one process. Links have a round trip of 0.1 ms, of
1 ms between two halves of the hosts, and 1 Gbit/s for messages of the head; some hosts drop every packet.
"""

import heapq
import json
import sys
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

from lockstep.base.transport.run_token import new_run_token
from lockstep.doctor.check.probe.peer_connections import PeerListener, PeerPort, dial_all
from lockstep.doctor.check.probe.probe_protocol import reach_answer_reader
from lockstep.doctor.check.probe.round_robin import LANES, measurement_rounds, pair_test_budget, peers_in_order

TOKEN = new_run_token()
BOUND_S = 10.0
ROUND_TRIPS = 5
"""Messages of one dial: connect, proof, three small frames."""
SAMPLE = 400
"""Number of measured dials."""
HEAD_BYTES_S = 125e6
"""1 Gbit/s."""

Link = Callable[[int, int], float | None]
"""Round trip in seconds between two hosts; None if packets are dropped."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Measured CPU seconds of one dial at each end, and of the head for one result of a pair."""

    end_s: float
    head_s: float


@dataclass(frozen=True, slots=True)
class Simulated:
    """The simulated durations in seconds."""

    hosts: int
    table_s: float
    """Until every probe has the table."""
    reach_s: float
    """From then until the last host has dialled all others or given up."""
    answers_s: float
    """Until the head has read all results."""
    rates_s: float
    """Duration of the rounds in which bandwidth is measured."""
    rounds: int
    unreached: int

    @property
    def total_s(self) -> float:
        return self.table_s + self.reach_s + self.answers_s + self.rates_s


def cost() -> Cost:
    """Measure the cost on this machine."""
    answering = PeerListener(TOKEN, "listener", "127.0.0.1", [], 1)
    label, port = next(iter(answering.ports.items()))
    began = time.process_time()
    found = dial_all([PeerPort("listener", "127.0.0.1", port, label)] * SAMPLE, TOKEN, "dialler", 2.0, 60.0, 2)
    both = (time.process_time() - began) / SAMPLE
    answering.close()
    assert not any(one.why for one in found)
    names = [f"host-{k}" for k in range(SAMPLE)]
    answer = json.dumps({"ms": [0.1234] * SAMPLE, "failed": []})
    read = reach_answer_reader(names)
    began = time.process_time()
    for name in names:
        {(name, peer): trip for peer, trip in zip(names, read(name, json.loads(answer)).ms, strict=True)}
    return Cost(both / 2, (time.process_time() - began) / SAMPLE**2)


def two_halves(many: int, silent: Collection[int] = ()) -> Link:
    """Links within and between two halves of the hosts; packets to silent hosts are dropped."""

    def link(one: int, other: int) -> float | None:
        if other in silent or one in silent:
            return None
        return 1e-4 if (one < many // 2) == (other < many // 2) else 1e-3

    return link


def simulate(many: int, link: Link, each: Cost, bound_s: float = BOUND_S) -> Simulated:
    """Simulate all hosts; each has its lanes, and one interpreter that does one thing at a time."""
    plan = pair_test_budget(many, 1, bound_s)
    row_bytes, answer_bytes = 70 * many, 8 * many
    table_s = many * row_bytes / HEAD_BYTES_S
    busy = [0.0] * many
    order = [peers_in_order(many, who) for who in range(many)]
    position, unreached, last = [0] * many, 0, 0.0
    lanes = [(0.0, who) for who in range(many) for _ in range(min(LANES, many - 1))]
    heapq.heapify(lanes)
    while lanes:
        now, who = heapq.heappop(lanes)
        if position[who] == len(order[who]):
            last = max(last, now)
            continue
        other = order[who][position[who]]
        position[who] += 1
        busy[who] = max(busy[who], now) + each.end_s
        trip = link(who, other)
        if trip is None:
            unreached += 1
            done = busy[who] + plan.dial_s
        else:
            busy[other] = max(busy[other], busy[who]) + each.end_s
            done = busy[other] + ROUND_TRIPS * trip
        heapq.heappush(lanes, (done, who))
    last = min(last, plan.reach_s)
    answers_s = max(many * answer_bytes / HEAD_BYTES_S, many * (many - 1) * each.head_s)
    rounds = len(measurement_rounds(many, plan.slots))
    rates_s = rounds * 2 * (plan.slot_s + 0.01 + 1e-4 * many)
    return Simulated(many, table_s, last, answers_s, rates_s, rounds, unreached)


def main() -> None:
    sizes = [int(word) for word in sys.argv[1:]] or [8, 64, 256, 1024]
    each = cost()
    print(f"measured: a dial costs {1e3 * each.end_s:.2f} ms of CPU at each end, {1e6 * each.head_s:.1f} us there")
    print("hosts  silent  table s  reach s  answers s  bandwidth s (rounds)  total s  one pair after another s")
    for many in sizes:
        for silent in ((), range(max(1, many // 16))):
            found = simulate(many, two_halves(many, silent), each)
            turns = many * (many - 1) / 2 * 2 * (2 * each.end_s + ROUND_TRIPS * 5e-4)
            print(
                f"{many:5}  {len(silent):6}  {found.table_s:7.2f}  {found.reach_s:7.2f}  {found.answers_s:9.2f}"
                f"  {found.rates_s:11.2f} ({found.rounds:4})     {found.total_s:8.2f}  {turns:12.0f}"
            )


if __name__ == "__main__":
    main()
