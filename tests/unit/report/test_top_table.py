"""The table of `lockstep top` at every width."""

import io
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from lockstep.report.top_table import DeviceTable, TopTable
from lockstep.watch.beacon.beacon_table import CommunicatorRow, CounterRow, ProcessRow, WaitRow
from lockstep.watch.devices.device_samples import DeviceSample
from lockstep.watch.diagnosis.verdict import Culprit, Verdict, VerdictKind, VerdictLevel


def shown(
    table: TopTable, rows: list[ProcessRow], width: int, verdicts: tuple[Verdict, ...] = (),
    devices: DeviceTable | None = None,
) -> list[str]:  # fmt: skip
    console = Console(file=io.StringIO(), width=width, highlight=False)
    console.print(table.render(rows, width, "run", verdicts, devices))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def squeezed(lines: list[str]) -> str:
    """The text without the line breaks and the spaces that wrapping changes."""
    return re.sub(r"\s+", "", "".join(lines))


words = st.text("abcdefgh-_.0123456789", min_size=1, max_size=40)
seconds = st.floats(0, 1e6)
counters = st.builds(
    CounterRow,
    words,
    st.integers(0, 10**12),
    st.none() | st.integers(0, 10**12),
    st.none() | st.floats(0, 1e9),
    seconds,
)
waiting = st.builds(WaitRow, words, words, words, seconds, seconds, st.none() | seconds, words)
communicators = st.builds(CommunicatorRow, words, st.integers(-1, 10**9), st.integers(-1, 10**9), words, seconds)
processes = st.builds(
    ProcessRow, name=st.text("policy-engine.0123", min_size=1, max_size=95), role=words, rank=st.integers(0, 99),
    pid=st.integers(1, 4194304), alive=st.booleans(), state=st.sampled_from(["running", "in the kernel", "gone"]),
    stage=words | st.just(""), stage_s=seconds, beat_s=st.none(), counters=st.lists(counters, max_size=4).map(tuple),
    waits=st.lists(waiting, max_size=2).map(tuple), communicators=st.lists(communicators, max_size=4).map(tuple),
)  # fmt: skip


@given(st.lists(processes, min_size=1, max_size=6), st.integers(40, 200))
def test_no_line_is_too_long_and_no_fact_is_lost(rows: list[ProcessRow], width: int) -> None:
    lines = shown(TopTable(), rows, width)
    assert all(len(line) <= width for line in lines)
    text = squeezed(lines)
    for row in rows:
        assert str(row.pid) in text and row.name in text
        assert (row.stage or "-") in text
        for wait in row.waits[:1]:
            assert squeezed([wait.waits_for]) in text and squeezed([wait.why]) in text


@given(st.lists(processes, min_size=1, max_size=4), st.lists(processes, min_size=1, max_size=4), st.integers(60, 200))
def test_columns_stay_where_they_are(first: list[ProcessRow], second: list[ProcessRow], width: int) -> None:
    """Once the widest contents have been seen, whatever is shown later."""
    table = TopTable()
    shown(table, first + second, width)

    def header(rows: list[ProcessRow]) -> str:
        return next(line for line in shown(table, rows, width) if line.startswith("process"))

    assert header(first) == header(second) == header(first)


RANKS = [
    ProcessRow(
        f"policy-{rank}", "policy", rank, 4194000 + rank, True, "sleeping", "train", 41.2, 0.3,
        (CounterRow("micro-batches", 12, 64, 3.2, 0.2), CounterRow("samples scored", 512, 4096, 230.4, 0.2)),
        (WaitRow("event", "engine-0 and 3 more", "completions of step 17", 12.0, 11.0, 48.0, "MainThread"),),
        (CommunicatorRow("fsdp", 411 + rank, 411, "all_reduce", 41.0),),
    )
    for rank in range(2)
]  # fmt: skip


@pytest.mark.parametrize("width", [80, 100, 120, 140])
def test_names_pids_and_waits_at_common_widths(width: int) -> None:
    culprit = Culprit(1, "policy", "", 4194001, name="policy-1")
    verdict = Verdict(VerdictKind.ABSENT, VerdictLevel.CONFIRMED, (culprit,), explanation="policy-1 is late.")
    lines = shown(TopTable(), RANKS, width, (verdict,))
    assert max(map(len, lines)) <= width
    header = next(line for line in lines if line.startswith("process"))
    rows = [line for line in lines if line.startswith("policy-") and "4194" in line]
    assert [row.split()[:2] for row in rows] == [["policy-1", "4194001"], ["policy-0", "4194000"]]
    assert [row.index("train") for row in rows] == [header.index("stage")] * 2
    text = squeezed(lines)
    assert text.count("engine-0and3more12s(event):completionsofstep17[atmost48smore]") == 2
    assert text.count("samplesscored512/4,096230/s") == 2 and "fsdp#412inall_reduce41s" in text


def test_rates_are_smoothed_and_begin_anew_with_the_process() -> None:
    table = TopTable()
    counter = CounterRow("tokens", 100, None, 100.0, 0.0)
    rates = [table._smoothed(7, counter, 1.0).rate for _ in range(3)]
    assert rates == pytest.approx([100.0] * 3)
    slower = table._smoothed(7, CounterRow("tokens", 100, None, 0.0, 0.0), 1.0).rate
    assert slower is not None and 70 < slower < 95
    assert table._smoothed(7, CounterRow("tokens", 100, None, None, 0.0), 1.0).rate is None
    assert table._smoothed(7, CounterRow("tokens", 100, None, 0.0, 0.0), 1.0).rate == 0.0


def test_a_worker_of_a_rank_has_a_line_below_it_where_it_waits() -> None:
    inside = CommunicatorRow("tp", 3, 2, "all_reduce", 41.0)
    waiting = ProcessRow("rank-0.8", "rank-0", 0, 8, True, "sleeping", "", 0.0, None, (), (), (inside,))
    quiet = replace(waiting, name="rank-0.9", pid=9, communicators=())
    gone = replace(quiet, name="rank-0.7", pid=7, alive=False, state="gone")
    lines = shown(TopTable(), [replace(RANKS[0], parts=(waiting, quiet, gone))], 140)
    assert "    child 8: sleeping, tp #3 in all_reduce 41s" in [line.rstrip() for line in lines]
    assert "    child 7: gone" in [line.rstrip() for line in lines] and not any("child 9" in line for line in lines)


GPU = DeviceSample(
    "GPU-3", 3, busy=98, memory_used=61 << 30, memory_total=80 << 30, power_w=612, throttled=("sw_thermal_slowdown",)
)


def test_gpus_have_a_column_once_one_is_sampled() -> None:
    table = TopTable()
    assert "gpu" not in shown(table, RANKS, 200)[0]
    pid = RANKS[0].pid
    for devices in ({pid: [GPU, replace(GPU, index=4, lost="GPU is lost")]}, {}):
        lines = shown(table, RANKS, 240, devices=devices)
        assert lines[0].split().index("gpu") == lines[0].split().index("collectives") - 1
        own = next(line for line in lines if str(pid) in line)
        assert ("3 98% 61/80 GiB 612 W sw_thermal_slowdown, 4 GPU is lost" in own) == bool(devices)


def test_an_instance_without_figures_shows_its_memory() -> None:
    part = DeviceSample("MIG-1", 0, parent="GPU-0", instance=1, memory_used=3 << 30, memory_total=20 << 30)
    lines = shown(TopTable(), RANKS, 200, devices={RANKS[0].pid: [part]})
    assert any("0.1 3/20 GiB" in line for line in lines)
