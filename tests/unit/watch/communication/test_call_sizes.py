"""Sizes of calls and their bus bandwidth, against nccl-tests' own arithmetic and numpy's quantiles.

The source: each test of https://github.com/NVIDIA/nccl-tests has a function `...GetBw(count, typesize, sec, ...)` in
`src/NAME.cu`, explained in `doc/PERFORMANCE.md`.
"""

import inspect
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.doctor.check.probe.selftest import bus_rate
from lockstep.report.communication.communication_summary import communication_summary
from lockstep.watch.beacon.beacon_records import SEPARATOR
from lockstep.watch.communication.arrival_totals import ArrivalTotals, Entry
from lockstep.watch.communication.call_sizes import bus_bytes, call_bytes, tensor_bytes
from lockstep.watch.communication.time_histogram import RELATIVE_ERROR
from lockstep.watch.recorder.operations import (
    FUNCTIONAL_OPERATIONS,
    OPERATIONS,
    ArgumentPositions,
    describe_call,
    get_argument,
)

NCCL_TESTS: dict[str, tuple[Callable[[int], int], Callable[[int], Fraction]]] = {
    "all_reduce": (lambda n: 1, lambda n: Fraction(2 * (n - 1), n)),
    "all_gather": (lambda n: n, lambda n: Fraction(n - 1, n)),
    "reduce_scatter": (lambda n: n, lambda n: Fraction(n - 1, n)),
    "broadcast": (lambda n: 1, lambda n: Fraction(1)),
    "reduce": (lambda n: 1, lambda n: Fraction(1)),
    "gather": (lambda n: n, lambda n: Fraction(n - 1, n)),
    "scatter": (lambda n: n, lambda n: Fraction(n - 1, n)),
}
"""By test: how many times `count` elements its size is, for n ranks, and the factor from its algorithm bandwidth (size
divided by time) to the bus bandwidth. `count` is what one rank sends to, or gets from, another (all_gather, gather: its
input; reduce_scatter, scatter: its output); for all_reduce, broadcast and reduce it is the whole buffer."""

Make = Callable[[int], torch.Tensor]
CALLS: dict[str, tuple[str, Callable[[Make, int, int], dict[str, Any]]]] = {
    "all_reduce": ("all_reduce", lambda make, count, n: {"tensor": make(count)}),
    "broadcast": ("broadcast", lambda make, count, n: {"tensor": make(count), "src": 0}),
    "reduce": ("reduce", lambda make, count, n: {"tensor": make(count), "dst": 0}),
    "all_gather_into_tensor": (
        "all_gather", lambda make, count, n: {"output_tensor": make(count * n), "input_tensor": make(count)}
    ),
    "all_gather": (
        "all_gather", lambda make, count, n: {"tensor_list": [make(count) for _ in range(n)], "tensor": make(count)}
    ),
    "reduce_scatter_tensor": (
        "reduce_scatter", lambda make, count, n: {"output": make(count), "input": make(count * n)}
    ),
    "reduce_scatter": (
        "reduce_scatter", lambda make, count, n: {"output": make(count), "input_list": [make(count) for _ in range(n)]}
    ),
    "gather": ("gather", lambda make, count, n: {"tensor": make(count), "gather_list": None, "dst": 0}),
    "scatter": ("scatter", lambda make, count, n: {"tensor": make(count), "scatter_list": None, "src": 0}),
}  # fmt: skip
"""By function of torch.distributed: its test, and the arguments of a call for a count and n ranks."""

COUNTS, RANKS = st.integers(1, 1 << 40), st.integers(2, 20_000)
DTYPES = st.sampled_from((torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex128))


def nccl_tests_bus_bytes(test: str, count: int, typesize: int, ranks: int) -> Fraction:
    """nccl-tests' bus bandwidth, times the seconds."""
    sized, factor = NCCL_TESTS[test]
    return count * sized(ranks) * typesize * factor(ranks)


def recorded_bytes(operation: str, text: str) -> int | None:
    name, dtype, _, module, shapes = text.split(SEPARATOR)
    assert name == operation
    return call_bytes(name, shapes, dtype, module)


@settings(max_examples=60, deadline=None)
@pytest.mark.parametrize("function", sorted(CALLS))
@given(COUNTS, st.integers(2, 16), DTYPES)
def test_a_call_of_torch_has_the_bus_bandwidth_of_nccl_tests(
    function: str, count: int, ranks: int, dtype: torch.dtype
) -> None:
    """From the arguments that torch's function is given, by way of the text that the recorder stores of them."""
    test, arguments = CALLS[function]

    def make(elements: int) -> torch.Tensor:
        return torch.empty((elements,), dtype=dtype, device="meta")

    given_arguments = arguments(make, count, ranks)
    original = getattr(dist, function)
    inspect.signature(original).bind(**given_arguments)
    operation = OPERATIONS[function]
    tensors = get_argument(ArgumentPositions(original, operation).tensor, (), given_arguments)
    _, text = describe_call(operation, tensors, None)
    nbytes = recorded_bytes(operation.name, text)
    if nbytes is None:
        assert isinstance(tensors, list) and len(text) > 100, "only a text that is too long has no bytes"
        return
    moved = bus_bytes(operation.name, nbytes, ranks)
    assert moved == pytest.approx(float(nccl_tests_bus_bytes(test, count, dtype.itemsize, ranks)), rel=1e-12)


@given(st.lists(st.integers(1, 1 << 30), min_size=1, max_size=4), RANKS)
@pytest.mark.parametrize(
    ("function", "test"),
    [
        ("all_reduce_coalesced", "all_reduce"), ("all_gather_into_tensor_coalesced", "all_gather"),
        ("reduce_scatter_tensor_coalesced", "reduce_scatter"),
    ],
)  # fmt: skip
def test_coalesced_calls_count_all_their_tensors(function: str, test: str, counts: list[int], ranks: int) -> None:
    operation, times = FUNCTIONAL_OPERATIONS[function], ranks if test == "reduce_scatter" else 1
    _, text = describe_call(
        operation, [torch.empty((each * times,), dtype=torch.float32, device="meta") for each in counts], None
    )
    nbytes = recorded_bytes(operation.name, text)
    assert nbytes == 4 * times * sum(counts)
    moved = bus_bytes(operation.name, nbytes, ranks)
    assert moved == pytest.approx(float(nccl_tests_bus_bytes(test, sum(counts), 4, ranks)), rel=1e-12)


@given(COUNTS, RANKS)
@pytest.mark.parametrize("operation", ["all_reduce", "all_gather", "reduce_scatter", "broadcast"])
def test_the_check_measures_the_same_bandwidth(operation: str, count: int, ranks: int) -> None:
    """What `lockstep check` measured stands beside it: a size is that of the whole data."""
    sized, _ = NCCL_TESTS[operation]
    rate = bus_rate(operation, count * sized(ranks) * 8, 0.25, range(ranks))
    assert rate * 0.25e6 == pytest.approx(float(nccl_tests_bus_bytes(operation, count, 8, ranks)), rel=1e-12)


def test_operations_without_a_size_or_a_factor_have_no_bandwidth() -> None:
    """Members may give all_to_all unequal parts, of which no size is recorded; messages belong to two members."""
    for name in ("all_to_all_single", "all_to_all"):
        _, text = describe_call(OPERATIONS[name], torch.empty((8,), device="meta"), None)
        assert recorded_bytes(name, text) is None
    for name in ("all_to_all_single", "send", "recv", "barrier", "all_gather_object", ""):
        assert bus_bytes(name, 100, 4) is None


@pytest.mark.parametrize(
    ("shapes", "dtype", "size"),
    [
        ("[4, 2], [3]", "float32", 44), ("[]", "int64", 8), ("[0]", "bool", 0), ("[2]", "float32, int64", None),
        ("", "float32", None), ("[7], [", "float32", None), ("[3]", "bfloat16", 6),
    ],
)  # fmt: skip
def test_the_bytes_of_tensors(shapes: str, dtype: str, size: int | None) -> None:
    assert tensor_bytes(shapes, dtype) == size


@given(st.lists(st.lists(st.integers(0, 9), max_size=4), min_size=1, max_size=5), DTYPES)
def test_the_bytes_are_those_of_the_tensors(shapes: list[list[int]], dtype: torch.dtype) -> None:
    tensors = [torch.empty(shape, dtype=dtype) for shape in shapes]
    _, text = describe_call(OPERATIONS["all_gather"], tensors, None)
    assert recorded_bytes("all_gather", text) == sum(each.numel() * each.element_size() for each in tensors)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(2, 5), st.integers(1, 400))
def test_late_arrivals_have_the_quantiles_of_numpy(
    tmp_path_factory: pytest.TempPathFactory, seed: int, ranks: int, calls: int
) -> None:
    """p50 and p99 of each pair, of each rank's lateness and of the spread of calls, to the error that docs state."""
    random = np.random.default_rng(seed)
    entered = np.arange(calls)[:, None] * 10**12 + random.lognormal(15, 3, (calls, ranks)).astype(np.int64)
    path = tmp_path_factory.mktemp("run") / "communication.json"
    totals = ArrivalTotals(path, "r")
    totals.describe({1: ("all_reduce", 8)})
    for call, row in enumerate(entered):
        for rank, at in enumerate(row):
            entry = Entry("h", int(at), 10**9, 1, 0, False)
            totals.add("k", "dp", "gloo", ranks, (0, call), rank, str(rank), entry)
    totals.write(0.0, last=True)
    summary = communication_summary(path)
    (communicator,) = summary["communicators"]
    late = ranks - 1 - entered[:, ::-1].argmax(axis=1)  # of several at once, the last rank
    last, spread = entered.max(axis=1), np.ptp(entered, axis=1)

    def check(shown: dict[str, float], durations: np.ndarray) -> None:
        for share, name in ((0.5, "p50"), (0.99, "p99")):
            exact = np.quantile(durations, share, method="inverted_cdf") / 1e6
            assert shown[name] == pytest.approx(exact, rel=RELATIVE_ERROR + 1e-9, abs=2e-6)

    check(communicator["operations"][0]["spread_ms"], spread)
    for each in communicator["ranks"]:
        if each["last"]:
            check(each["late_ms"], spread[late == int(each["process"])])
    assert sum(each["calls"] for each in communicator["pairs"]) == calls * (ranks - 1)
    matrix = summary["matrix"]
    for pair in communicator["pairs"]:
        of = late == int(pair["late"])
        waits = last[of] - entered[of, int(pair["waiting"])]
        check(pair["wait_ms"], waits)
        row, column = (matrix["processes"].index(pair[end]) for end in ("late", "waiting"))
        check(matrix["wait_ms"][row][column], waits)


def test_the_error_of_quantiles_is_the_one_that_docs_state() -> None:
    text = (Path(__file__).parents[4] / "docs" / "communication.md").read_text()
    assert f"exact to {RELATIVE_ERROR:.1%}" in text
