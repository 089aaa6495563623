"""What the controller does for many workers grows as they do, and not with their square: by counting calls."""

import itertools
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from benchmarks.fake_workers import completion_of
from benchmarks.scale import COORDINATION, ITEMS, Size, World, coordination_s, limit_s, measure, table, title
from lockstep.cluster.rpc import codec


def calls_of(work: Callable[[], Any]) -> int:
    """Calls of functions in this thread, C's included, and resumptions of generators."""
    count = 0

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def world(folder: Path, engines: int, ranks: int) -> World:
    made = World(Size(engines, ranks, 4, 8), folder / f"run-{engines}-{ranks}", 8, 0.0)
    made.fleet._pool._hold_s = 1e9  # no multiple of it passes during a test
    return made


def test_handing_out_and_collecting_grow_with_the_engines_and_not_with_their_square(tmp_path: Path) -> None:
    counts = []
    for engines in (16, 64, 256):
        of = world(tmp_path, engines, 4 * engines)
        given = calls_of(lambda of=of: of.buffer.request(0))  # type: ignore[misc]
        of._generate(0)
        taken = calls_of(lambda of=of: of.buffer.take(0, of.size.prompts))  # type: ignore[misc]
        counts.append((given / engines, taken / engines))
        of.close()
    for small, large in itertools.pairwise(counts):
        assert large[0] < 1.3 * small[0] and large[1] < 1.3 * small[1], counts


def test_news_of_one_engine_cost_the_same_among_few_and_among_many(tmp_path: Path) -> None:
    counts = []
    for engines in (8, 512):
        of = world(tmp_path, engines, 8)
        of.buffer.request(0)
        one, request = of.engines[3], of.engines[3].requests[0]
        one.finish(completion_of(request, 8, 0))
        counts.append(calls_of(lambda of=of: of.buffer._collect()))  # type: ignore[misc]
        of.close()
    assert counts[1] <= counts[0] + 5, counts


def test_what_all_ranks_get_is_encoded_once_and_equal_answers_are_decoded_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of = world(tmp_path, 2, 64)
    counted = {"encode_payload": 0, "decode_payload": 0}

    def counting(name: str) -> None:
        function = getattr(codec, name)

        def wrapped(*given: Any) -> Any:
            counted[name] += 1
            return function(*given)

        monkeypatch.setattr(codec, name, wrapped)

    counting("encode_payload")
    counting("decode_payload")
    of.policy.write_weights(7)
    # The 64 stand-ins decode their arguments and encode their answers with the same functions.
    assert counted == {"encode_payload": 1 + 64, "decode_payload": 64}, "an answer without a value is not decoded"
    assert of.calls()["write_weights"] == 64
    of.close()


def test_the_counters_of_engines_are_not_asked_for_while_they_are_waited_for(tmp_path: Path) -> None:
    of = world(tmp_path, 4, 16)
    of.buffer.request(0)
    of._generate(0)
    of.buffer.take(0, of.size.prompts)
    assert "progress" not in of.calls()
    of.close()


@pytest.mark.slow
def test_the_benchmark_runs_and_tells_every_part_and_its_limit() -> None:
    size = Size(8, 32, 4, 8)
    relayed, separate = measure([size, replace(size, relays="separate")], 1, 0.05)
    assert (relayed["connections"], separate["connections"]) == (2, 5), "four nodes of eight workers share a relay"
    assert title(separate) == "8 behind each relay" and 0 < separate["relay"] < relayed["relay"]
    assert relayed["messages"]["sent"] < 0.75 * separate["messages"]["sent"]
    assert set(COORDINATION) <= set(relayed["seconds"]) and all(value >= 0 for value in relayed["seconds"].values())
    calls = relayed["calls"]
    assert calls["step"] == calls["write_weights"] == 2 * 32
    assert relayed["messages"]["sent"] < 0.3 * sum(calls.values()), "a call of all workers of a node is one message"
    (direct,) = measure([Size(8, 32, 4, 8, relays="none")], 1, 0.05)
    assert direct["messages"]["sent"] >= sum(direct["calls"].values()) > 4 * relayed["messages"]["sent"]
    assert set(COORDINATION) - {"metrics"} == set(relayed["limits"]) == set(direct["limits"])
    for found in (direct, relayed):
        items = {item for part in found["limits"].values() for item in part}
        assert items == set(ITEMS) and 0 < limit_s(found) < coordination_s(found)
    lines = table({title(found): found for found in (direct, relayed)})
    assert sum(line.startswith("|") for line in lines) == len(COORDINATION) + 3 + len(ITEMS) + 4
