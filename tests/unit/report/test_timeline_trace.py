"""The trace of a timeline: one clock, joined collectives with bandwidths, rows without overlaps, hostile text kept."""

import gzip
import json
from binascii import b2a_base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.perfetto_page import MISSING, PerfettoPage, perfetto_page
from lockstep.report.timeline_capture_reader import capture_files, has_ended, read_timeline
from lockstep.report.timeline_trace import build_trace, write_trace
from lockstep.watch.beacon.beacon_records import CALL_STRUCT, FLAG_ASYNC, FLAG_FAILED, SEPARATOR
from lockstep.watch.beacon.span_ring import SpanKind

MS = 1_000_000
HEADER = {"lockstep_timeline": 2, "run": "r", "at_ns": 0, "wall": 1_700_000_000.0, "since_ns": 0}
END = {"end": "complete", "at_ns": 0}


def call(number: int, entered: int, left: int, flags: int = 0, issued: int | None = None) -> bytes:
    """A call as it is stored in a beacon."""
    fields = number, issued or number, entered, left, 7, 1, 2, flags, 3
    return CALL_STRUCT.pack(number, *fields, number)


TEXTS = {1: SEPARATOR.join(["all_reduce", "float32", "", "", "[1000, 250]"]), 2: "/a/train.py:31 in f", 3: "train"}


def process(rank: int, calls: list[bytes] | None = None, **more: Any) -> dict[str, Any]:
    """A process of an answer; `answer` moves the copies of its calls."""
    communicator = {"id": "0b", "name": "fsdp", "size": 2, "rank": rank, "on_device": False}
    return {
        "name": f"policy-{rank}", "role": "policy", "rank": rank, "pid": 100 + rank, "stage": ["", 0], "waits": [],
        "counters": {}, "spans": [], "texts": TEXTS, "lost": 0, "copies": b"".join(calls or []),
        "communicators": [communicator] if calls else [],
    } | more  # fmt: skip


def answer(host: str, *processes: dict[str, Any], now: int = 100 * MS, offset: int = 0, **more: Any) -> dict[str, Any]:
    given, copies = [], list[str]()
    for each in processes:
        rest = {name: value for name, value in each.items() if name != "copies"}
        rest["communicators"] = [of | {"calls": len(copies)} for of in each["communicators"]]
        if each["copies"]:
            copies.append(b2a_base64(each["copies"], newline=False).decode())
        given.append(rest)
    return {"host": host, "offset_ns": offset, "now_ns": now, "processes": given, "calls": copies} | more


def written(folder: Path, *lines: dict[str, Any], name: str = "1.jsonl") -> Path:
    file = folder / "timeline" / name
    file.parent.mkdir(exist_ok=True)
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def trace_of(*files: Path) -> dict[str, Any]:
    return build_trace(read_timeline(files))[0]


def slices(trace: dict[str, Any], category: str) -> list[dict[str, Any]]:
    return [each for each in trace["traceEvents"] if each["ph"] == "X" and each["cat"] == category]


def test_hosts_are_on_one_clock_and_a_collective_has_its_bandwidth(tmp_path: Path) -> None:
    """Host b's clock is 5 ms ahead. Rank 1 enters last; then a megabyte is reduced in 2 ms."""
    ahead = 5 * MS
    file = written(
        tmp_path, HEADER, answer("a", process(0, [call(1, 10 * MS, 32 * MS)])),
        answer("b", process(1, [call(1, 30 * MS + ahead, 32 * MS + ahead)]), offset=ahead), END,
    )  # fmt: skip
    trace = trace_of(file)
    first, second = sorted(slices(trace, "collectives"), key=lambda each: each["ts"])
    assert (first["ts"], first["dur"], second["ts"], second["dur"]) == (0.0, 22_000.0, 20_000.0, 2_000.0)
    assert first["args"]["bytes"] == 1_000_000 and first["args"]["call site"] == "/a/train.py:31 in f"
    assert first["args"]["waited for the last member (us)"] == 20_000.0
    assert first["args"]["bus bandwidth (GB/s)"] == second["args"]["bus bandwidth (GB/s)"] == 0.5
    start, end = (each for each in trace["traceEvents"] if each["ph"] in "sf")
    assert (start["pid"], end["pid"], start["ts"], end["ts"]) == (second["pid"], first["pid"], 20_000.0, 20_000.0)
    assert end["bp"] == "e" and start["id"] == end["id"]
    (arrival,) = slices(trace, "arrival")  # in which the arrow ends
    assert (arrival["name"], arrival["ts"], arrival["dur"]) == ("policy-1 entered", 20_000.0, 2_000.0)
    assert (arrival["pid"], arrival["tid"]) == (first["pid"], first["tid"])
    assert trace["otherData"]["began"] == pytest.approx(1_700_000_000.01)


def test_an_asynchronous_call_has_no_bandwidth(tmp_path: Path) -> None:
    calls = [[call(1, 10 * MS, 11 * MS, FLAG_ASYNC)], [call(1, 12 * MS, 13 * MS)]]
    trace = trace_of(written(tmp_path, HEADER, answer("a", process(0, calls[0]), process(1, calls[1]))))
    for each in slices(trace, "collectives"):
        assert "bus bandwidth (GB/s)" not in each["args"]


def test_a_call_that_returns_later_is_one_slice(tmp_path: Path) -> None:
    read = [
        answer("a", process(0, [call(1, 10 * MS, left)]), now=now) for left, now in ((0, 20 * MS), (50 * MS, 60 * MS))
    ]
    (only,) = slices(trace_of(written(tmp_path, HEADER, *read)), "collectives")
    assert (only["dur"], "unfinished" in only["args"]) == (40_000.0, False)
    (still,) = slices(trace_of(written(tmp_path, HEADER, read[0], name="2.jsonl")), "collectives")
    assert (still["dur"], still["args"]["unfinished"]) == (10_000.0, True)


@pytest.mark.parametrize("flags", [0, FLAG_FAILED])
def test_a_call_that_was_read_while_it_waited_is_measured_when_it_has_returned(tmp_path: Path, flags: int) -> None:
    """The longest waits are always read before they end."""
    read = [
        answer("a", process(0, [call(1, 10 * MS, 0)]), now=20 * MS),
        answer("a", process(0, [call(1, 10 * MS, 32 * MS, flags)]), process(1, [call(1, 30 * MS, 32 * MS)])),
    ]
    first, second = sorted(slices(trace_of(written(tmp_path, HEADER, *read)), "collectives"), key=lambda s: s["ts"])
    assert first["args"].get("failed") == (True if flags else None)
    assert first["args"].get("waited for the last member (us)") == (None if flags else 20_000.0)
    assert second["args"].get("bus bandwidth (GB/s)") == (None if flags else 0.5)


def test_overlapping_requests_get_rows_of_their_own(tmp_path: Path) -> None:
    spans = [[SpanKind.REQUEST, f"r{n}", n * MS, (n + 3) * MS, 7, ""] for n in range(1, 7)]
    trace = trace_of(written(tmp_path, HEADER, answer("a", process(0, spans=spans))))
    rows: dict[int, list[dict[str, Any]]] = {}
    for each in slices(trace, "requests"):
        rows.setdefault(each["tid"], []).append(each)
        assert each["args"] == {"tokens": 7}
    assert len(rows) == 3 and all(len(row) == 2 for row in rows.values())
    names = {e["args"]["name"] for e in trace["traceEvents"] if e["ph"] == "M" and e["name"] == "thread_name"}
    assert names == {"requests", "requests (2)", "requests (3)"}


def test_stages_waits_and_counters_that_go_on_are_shown(tmp_path: Path) -> None:
    read = [
        answer("a", process(0, stage=["train", 1 * MS], waits=[["x (future): y", "MainThread", 2 * MS]],
                            counters={"tokens": [tokens, None], "step": [3, 8]}), now=now)
        for tokens, now in ((100, 500 * MS), (300, 1500 * MS))
    ]  # fmt: skip
    trace = trace_of(written(tmp_path, HEADER, *read))
    (stage,), (wait,) = slices(trace, "stages"), slices(trace, "waits")
    assert (stage["name"], stage["dur"], stage["args"]) == ("train", 1_499_000.0, {"unfinished": True})
    assert wait["name"] == "x (future): y"
    values = [(e["name"], e["args"]["value"]) for e in trace["traceEvents"] if e["ph"] == "C"]
    assert ("tokens/s", 200.0) in values and ("step", 3.0) in values


def test_what_two_captures_have_is_shown_once(tmp_path: Path) -> None:
    one = answer("a", process(0, [call(1, 10 * MS, 20 * MS)], spans=[[SpanKind.STAGE, "train", 1, 2 * MS, 0, ""]]))
    files = [written(tmp_path, HEADER, one, END), written(tmp_path, HEADER, one, END, name="2.jsonl")]
    trace = trace_of(*files)
    assert (len(slices(trace, "collectives")), len(slices(trace, "stages"))) == (1, 1)


def test_verdicts_and_gpus_are_shown(tmp_path: Path) -> None:
    devices = {"devices": [{"sample": {"index": 3, "busy": 98, "power_w": 612.5}}]}
    note = {"verdict": "policy-1 has not entered", "level": "confirmed", "change": "told", "at_ns": 50 * MS}
    gone = note | {"change": "withdrawn"}
    trace = trace_of(written(tmp_path, HEADER, answer("a", devices=devices), note, gone, END))
    (instant,) = [each for each in trace["traceEvents"] if each["ph"] == "i"]
    assert (instant["s"], instant["name"]) == ("g", "confirmed: policy-1 has not entered")
    assert {each["name"] for each in trace["traceEvents"] if each["ph"] == "C"} == {"GPU 3 busy %", "GPU 3 W"}


def test_a_capture_that_was_cut_or_damaged_is_read_as_far_as_possible(tmp_path: Path) -> None:
    file = written(tmp_path, HEADER, answer("a", process(0, [call(1, 10 * MS, 20 * MS)])))
    assert not has_ended(file)
    with file.open("ab") as content:
        content.write(b'{"host": 7}\n\xff\xfe\n' + b"[" * 100_000 + b'\n{"host": "a", "proc')
    trace = trace_of(file)
    assert len(slices(trace, "collectives")) == 1 and trace["otherData"]["unreadable lines"] == 3
    (tmp_path / "other.jsonl").write_text('{"a": 1}\n')
    with pytest.raises(ValueError, match=r"other\.jsonl is no capture"):
        read_timeline([tmp_path / "other.jsonl"])
    with pytest.raises(ValueError, match=r"1\.jsonl has format 1 of timelines, and this version of Lockstep reads 2"):
        read_timeline([written(tmp_path, HEADER | {"lockstep_timeline": 1}, END)])


def test_hostile_text_and_times_make_a_valid_trace(tmp_path: Path) -> None:
    evil = '"},{"ph":"X","name":"<script>\x00\u2028'
    spans = [[99, evil, 2**62, 1, -5, evil], [SpanKind.STAGE, evil * 50, 5, 3, 0, ""]]
    calls = [call(1, 7, 3), CALL_STRUCT.pack(2, -2, 2**64 - 1, 10, 20, 1, 99, 2**32 - 1, 255, 9, 2), b"cut short"]
    path = tmp_path / "out.json.gz"
    write_trace(
        read_timeline([written(tmp_path, HEADER, answer(evil, process(0, calls, spans=spans, name=evil)))]), path
    )
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    assert all(each.get("dur", 0) >= 0 and each.get("ts", 0) >= 0 for each in events)
    assert any(evil in str(each["args"].get("name")) for each in events if each["ph"] == "M")


def test_the_captures_of_a_run_and_of_its_incidents_are_found(tmp_path: Path) -> None:
    incident = tmp_path / "incidents" / "20261127-1-absent"
    incident.mkdir(parents=True)
    (incident / "verdict.json").write_text("{}")
    (incident / "capture.jsonl").write_text(json.dumps(HEADER) + "\n")
    file = written(tmp_path, HEADER, END)
    assert has_ended(file)
    assert capture_files(tmp_path) == [incident / "capture.jsonl", file]
    assert capture_files(incident) == capture_files(incident.parent) == [incident / "capture.jsonl"]
    assert capture_files(file) == [file]


@pytest.fixture(scope="module")
def perfetto() -> Iterator[PerfettoPage]:
    with perfetto_page() as page:
        yield page


needs_perfetto = pytest.mark.skipif(bool(MISSING), reason=f"needs {' and '.join(MISSING)}")
SOME = {
    "spans": [[SpanKind.STAGE, "train", 1 * MS, 40 * MS, 0, ""]]
    + [[SpanKind.REQUEST, f"r{number}", number * MS, (number + 3) * MS, 7, ""] for number in range(1, 7)],
    "waits": [["x (future): y", "MainThread", 2 * MS]],
    "counters": {"tokens": [100, None], "step": [3, 8]},
}


@pytest.mark.slow
@needs_perfetto
def test_perfetto_reads_all_of_a_trace(tmp_path: Path, perfetto: PerfettoPage) -> None:
    """Rows, slices, counters, verdicts and arrows, which lead from the rank that was late to the ones that waited."""
    late = [call(number, (10 * number + 7) * MS, (10 * number + 8) * MS) for number in range(1, 4)]
    early = [call(number, (10 * number + number) * MS, (10 * number + 9) * MS) for number in range(1, 4)]
    unfinished = call(4, 50 * MS, 0)
    devices = {"devices": [{"sample": {"index": 3, "busy": 98, "power_w": 612.5}}]}
    note = {"verdict": "policy-1 has not entered", "level": "confirmed", "change": "told", "at_ns": 50 * MS}
    file = written(
        tmp_path, HEADER, answer("a", process(0, early, **SOME), process(2, [*early, unfinished]), devices=devices),
        answer("b", process(1, late, **SOME), now=90 * MS), note, END,
    )  # fmt: skip
    write_trace(read_timeline([file]), tmp_path / "trace.json.gz")
    perfetto.open(tmp_path / "trace.json.gz")
    assert perfetto.differences(trace_of(file)) == []
    arrows = perfetto.query("select count(*) as n, min(ts) as ts from flow join slice on slice.id = slice_in")
    assert arrows == [{"n": 6, "ts": 16 * MS}]  # times begin with the first stage, at 1 ms
    bytes_of = "select distinct extract_arg(arg_set_id, 'args.bytes') as bytes from slice where name = 'all_reduce'"
    assert perfetto.query(bytes_of) == [{"bytes": 1_000_000}]


@pytest.mark.slow
@needs_perfetto
def test_perfetto_shows_hostile_text_as_text(tmp_path: Path, perfetto: PerfettoPage) -> None:
    evil = '"},{"ph":"X","name":"<script>\u2028\u202e'
    spans = [[99, evil, 2**62, 1, -5, evil], [SpanKind.STAGE, evil * 50, 5, 3, 0, ""]]
    file = written(tmp_path, HEADER, answer(evil, process(0, [call(1, 7, 3)], spans=spans, name=evil)), END)
    write_trace(read_timeline([file]), tmp_path / "trace.json")
    perfetto.open(tmp_path / "trace.json")
    assert perfetto.differences(trace_of(file)) == []


@pytest.mark.slow
@needs_perfetto
def test_a_trace_that_perfetto_reads_otherwise_is_noticed(tmp_path: Path, perfetto: PerfettoPage) -> None:
    """What the tests above rely on: of two slices that overlap in a row, Perfetto drops one."""
    named = [
        {"ph": "M", "name": f"{what}_name", "pid": 1, "tid": tid, "args": {"name": what}}
        for what, tid in (("process", 0), ("thread", 1))
    ]
    overlapping = [
        {"ph": "X", "cat": "stages", "name": name, "pid": 1, "tid": 1, "ts": ts, "dur": 10.0, "args": {}}
        for name, ts in (("a", 0.0), ("b", 5.0))
    ]
    trace = {"traceEvents": [*named, *overlapping]}
    (tmp_path / "trace.json").write_text(json.dumps(trace))
    perfetto.open(tmp_path / "trace.json")
    dropped, slices_read = perfetto.differences(trace)
    assert dropped == "slice_drop_overlapping_complete_event: 1"
    assert slices_read == "slices: [('process', 'thread', 'b', 5000, 10000, 0)] read as []"
