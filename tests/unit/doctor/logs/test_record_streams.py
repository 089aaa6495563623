"""Records of collectors and structured loggers are read like the plain lines they hold."""

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.doctor.logs.line_origin import parse_prefixes
from lockstep.doctor.logs.log_records import records_of
from lockstep.doctor.logs.record_streams import plain_blocks
from lockstep.doctor.logs.timestamps import TimestampParser
from lockstep.doctor.output.job_answer import answer_job
from tests.unit.doctor.job_logs import raised, steps, watchdog

WHEN = 1_795_000_000.25
DATE = "2026-11-18T11:06:40.250000000Z"
POD = "trainer-7c9d8-x7k2p"
Row = Callable[[str], Any]


def as_json_lines(row: Row) -> Callable[[list[str]], str]:
    return lambda lines: "".join(json.dumps(row(each)) + "\n" for each in lines)


def google(line: str) -> dict[str, Any]:
    labels = {"pod_name": POD, "namespace_name": "ml"}
    return {"textPayload": line, "insertId": "x", "resource": {"labels": labels}, "timestamp": DATE}


def loki(lines: list[str]) -> str:
    values = [[str(int((WHEN + at) * 1e9)), each] for at, each in reversed([*enumerate(lines)])]
    return json.dumps({"status": "success", "data": {"result": [{"stream": {"pod": POD}, "values": values}]}})


FORMATS: dict[str, Callable[[list[str]], str]] = {
    "docker": as_json_lines(lambda line: {"log": line + "\n", "stream": "stderr", "time": DATE}),
    "nested": as_json_lines(lambda line: {"log": json.dumps({"message": line}) + "\n", "stream": "stderr"}),
    "twice nested": as_json_lines(lambda line: {"log": json.dumps({"log": json.dumps({"msg": line})})}),
    "google, text": as_json_lines(google),
    "google, JSON": as_json_lines(lambda line: {"jsonPayload": {"message": line}, "timestamp": DATE}),
    "google, array": lambda lines: json.dumps([google(each) for each in lines], indent=2),
    "loki": loki,
    "logcli": as_json_lines(lambda line: {"labels": {"pod": POD}, "line": line, "timestamp": DATE}),
    "cloudwatch": lambda lines: json.dumps({"events": [{"timestamp": 1795000000250, "message": x} for x in lines]}),
    "cloudwatch lines": as_json_lines(lambda line: {"events": [{"timestamp": 1795000000250, "message": line}]}),
    "fluent bit": as_json_lines(
        lambda line: {"@timestamp": DATE, "log": line, "kubernetes": {"pod_name": POD, "host": "gke-1"}}
    ),
    "elasticsearch": lambda lines: json.dumps(
        {"hits": {"hits": [{"_id": "7", "_source": {"@timestamp": DATE, "message": each}} for each in lines]}}
    ),
    "journald": as_json_lines(
        lambda line: {"__REALTIME_TIMESTAMP": "1795000000250000", "MESSAGE": line, "_HOSTNAME": "gpu-7"}
    ),
    "structlog": as_json_lines(lambda line: {"event": line, "level": "info", "timestamp": DATE}),
    "json logger": as_json_lines(
        lambda line: {"asctime": "2026-11-18 11:06:40,250", "levelname": "INFO", "name": "train", "message": line}
    ),
    "behind a prefix": as_json_lines(lambda line: {"ts": WHEN, "level": "info", "msg": line}),
}  # fmt: skip


def plain(text: str | bytes, size: int = 1 << 22) -> list[str]:
    """Returns the lines of a source that is read in blocks of a size."""
    data = text.encode() if isinstance(text, str) else text
    blocks = (data[at : at + size] for at in range(0, len(data), size))
    return b"".join(plain_blocks(blocks)).decode().splitlines()


def message(line: str) -> str:
    return line[parse_prefixes(line, TimestampParser()).at :]


def wrapped(form: str, lines: list[str]) -> str:
    text = FORMATS[form](lines)
    return "".join(f"[pod/{POD}/c] {each}\n" for each in text.splitlines()) if form == "behind a prefix" else text


WORDS = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs", "Zl", "Zp", "Zs"]), min_size=1)
LINES = st.lists(st.lists(WORDS, min_size=1, max_size=4).map(lambda words: "m " + " ".join(words)), min_size=3)


@pytest.mark.parametrize("form", FORMATS)
@settings(max_examples=25)
@given(lines=LINES)
def test_wrapping_in_any_form_gives_the_same_lines(form: str, lines: list[str]) -> None:
    found = plain(wrapped(form, lines))
    assert [each.split("stdout F ")[-1].split("stderr F ")[-1] for each in found] == lines


@pytest.mark.parametrize("form", FORMATS)
def test_indentation_time_and_pod_are_kept(form: str) -> None:
    lines = ["Traceback (most recent call last):", '  File "/a/t.py", line 3, in f', "    x = y", "KeyError: 'x'"]
    for line, given_line in zip(plain(wrapped(form, lines)), lines, strict=True):
        found = parse_prefixes(line, TimestampParser())
        assert line[found.at :] == given_line
        assert found.when == (None if "nested" in form else pytest.approx(WHEN, abs=4))
        known = {POD} if form in ("loki", "logcli", "fluent bit", "behind a prefix") or "text" in form else {"", POD}
        assert found.origin.host in ({"gpu-7"} if form == "journald" else known)


@pytest.mark.parametrize("form", FORMATS)
def test_a_job_has_the_answer_of_its_plain_lines(form: str, tmp_path: Path) -> None:
    job = [*steps(0, 8), *steps(1, 8), *raised(1, "KeyError: 'answer'"), *watchdog(0, 7)]
    (tmp_path / "plain.log").write_text("\n".join(job))
    (tmp_path / "wrapped.json").write_text(wrapped(form, job))
    one, other = (answer_job([str(tmp_path / name)]).verdict for name in ("plain.log", "wrapped.json"))
    assert (one.cause, one.kind) == (other.cause, other.kind)
    assert [(each.rank, each.where) for each in one.culprits] == [(each.rank, each.where) for each in other.culprits]
    assert [each.line for each in one.evidence] == [each.line for each in other.evidence]


def test_answers_with_the_newest_first_are_turned_round() -> None:
    rows = [{"textPayload": f"m {at}", "timestamp": f"2026-11-18T11:06:{at:02d}Z"} for at in range(40)]
    newest_first = rows[::-1]
    as_lines = "".join(json.dumps(each) + "\n" for each in newest_first)
    for text in (json.dumps(newest_first), json.dumps(newest_first, indent=1), as_lines):
        assert [message(each) for each in plain(text)] == [f"m {at}" for at in range(40)]


def test_an_answer_whose_times_rise_and_fall_keeps_its_order() -> None:
    seconds = (5, 1, 2, 3, 4)
    rows = [{"textPayload": f"m {at}", "timestamp": f"2026-11-18T11:06:{at:02d}Z"} for at in seconds]
    for text in (json.dumps(rows), "".join(json.dumps(each) + "\n" for each in rows)):
        assert [message(each) for each in plain(text)] == [f"m {at}" for at in seconds]


def test_the_streams_of_several_pods_are_merged_by_time() -> None:
    def stream(pod: str, *seconds: int) -> dict[str, Any]:
        return {"stream": {"pod": pod}, "values": [[f"{1795000000 + at}000000000", f"m {at}"] for at in seconds]}

    text = json.dumps({"data": {"result": [stream("a-0", 8, 4, 2, 0), stream("a-1", 7, 3, 1)]}})
    assert [message(each) for each in plain(text)] == [f"m {at}" for at in (0, 1, 2, 3, 4, 7, 8)]


def test_a_logger_s_rank_traceback_and_fields_are_read() -> None:
    record = {"message": "failed", "level": "error", "ts": WHEN, "rank": 3, "step": 10, "lineno": 7,
              "exc_info": "Traceback (most recent call last):\n  File 't.py', line 1\nKeyError: 1"}  # fmt: skip
    found = plain(f"{json.dumps(record)}\n" * 3)[:4]
    assert [parse_prefixes(each, TimestampParser()).origin.rank for each in found] == [3] * 4
    assert [message(each).strip() for each in found] == [
        "failed step=10", "Traceback (most recent call last):", "File 't.py', line 1", "KeyError: 1"
    ]  # fmt: skip
    assert "[ERROR] failed" in found[0]


def test_parts_of_a_line_are_joined_at_the_line_of_the_last() -> None:
    text = (
        "2026-11-18T11:06:40.25Z stderr P Runtime\n2026-11-18T11:06:40.26Z stdout F between\n"
        "2026-11-18T11:06:40.27Z stderr P Error: \n2026-11-18T11:06:40.28Z stderr F out of memory\n"
        "2026-11-18T11:06:40.29Z stdout P rest"
    )
    assert [message(each) for each in plain(text)] == ["", "between", "", "RuntimeError: out of memory", "", "rest"]


@pytest.mark.parametrize(
    "text",
    [
        "plain\n[1, 2]\n{'a': 1}\n",
        '{"step": 1, "loss": 0.5, "time": 1795000000}\n' * 5,
        '{"prompt": "a", "completion": "b"}\n' * 5,
        '{"message": "no log"}\n' * 5,
        '{"event": "loaded", "time": 1795000000}\n' + '{"step": 1, "time": 1795000000}\n' * 5,
        '{"message": "cut", "time": \n' * 5,
        '{"log": ' + "[" * 100_000,
        '{"message": ' * 50_000,
        '[{"message": "a", "time": "2026-11-18T11:06:40Z"}, {"mess',
        '{"message": 1e999, "time": NaN}\n{"log": null}\n{"log": []}\n' * 3,
        "",
        "\n\n",
        '{"time": ' + "9" * 10_000 + ', "log": 3}\n',
    ],
)
@pytest.mark.parametrize("size", [1 << 22, 1000])
def test_what_is_no_record_stays_as_it_is(text: str, size: int) -> None:
    blocks = (text.encode()[at : at + size] for at in range(0, len(text), size))
    assert b"".join(plain_blocks(blocks)) == text.encode()


@pytest.mark.parametrize("when", [1e308, -5, 10**40, "9" * 400, "0000-99-99T99:99:99Z", True, {}, [], "soon", 0, "NaN"])
def test_absurd_times_are_none(when: object) -> None:
    [found] = records_of({"log": "m", "timestamp": when})
    assert found.when is None and [*found.lines()] == ["stdout F m"]


@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.text(),
        lambda inside: (
            st.lists(inside)
            | st.dictionaries(
                st.sampled_from(
                    ["log", "message", "time", "kubernetes", "labels", "rank", "host", "values", "stream", "level"]
                ),
                inside,
            )
        ),
    )
)
def test_any_json_is_read_without_error(value: object) -> None:
    text = json.dumps(value) + "\n"
    assert plain(text * 3) is not None


def test_a_long_stream_is_read_in_parts_in_linear_time() -> None:
    line = json.dumps({"log": "m\n", "stream": "stdout", "time": DATE}).encode() + b"\n"
    count, block = 0, line * 2_000

    def blocks() -> Iterator[bytes]:
        nonlocal count
        for _ in range(20):
            count += 1
            yield block

    found = plain_blocks(blocks())
    assert next(found).startswith(b"2026-11-18T11:06:40.250000Z stdout F m\n") and count == 1
    assert sum(each.count(b"\n") for each in found) == 19 * 2_000
    hostile = [b"{" * (1 << 20), b'{"log": "' + b'{\\"log\\": ' * 100_000 + b"\n", b"[" * (1 << 20), b'{"a":' * 200_000]
    began = time.monotonic()
    for each in hostile:
        assert sum(map(len, plain_blocks(iter([each, each, b"\n"])))) >= len(each)
    assert time.monotonic() - began < 20
