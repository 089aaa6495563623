"""Pages, lines, kinds of files and lines, and printed samples."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.doctor.judge.log_diagnosis import explain
from lockstep.doctor.logs import log_lines
from lockstep.doctor.logs.log_lines import (
    Page,
    clean_text,
    excerpt,
    is_quoted,
    kind_of_file,
    kind_of_line,
    numbered_lines,
    rewritten_parts,
    split_pages,
    unwrap_page,
    wrap_width,
)
from lockstep.doctor.logs.prefilter import Prefilter
from tests.unit.doctor.job_logs import raised, steps, write

_BLOCKS = st.lists(
    st.binary(max_size=40) | st.sampled_from([b"\n", b"a\nb", b"\r\n", b"\n\n", b"\r", b"needle"]), max_size=12
)


def _plain(blocks: list[bytes]) -> list[bytes]:
    data = b"".join(blocks)
    return data.split(b"\n")


@given(_BLOCKS)
def test_lines_are_numbered_as_split_counts_them(blocks: list[bytes]) -> None:
    data = b"".join(blocks)
    if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return
    seen = [each for page in split_pages(iter(blocks)) for each in numbered_lines(page)]
    expected = list(enumerate(data.split(b"\n"), 1))
    if expected and not expected[-1][1]:
        expected.pop()
    assert seen == expected


@given(_BLOCKS)
def test_candidates_are_the_parts_of_lines_with_a_text(blocks: list[bytes]) -> None:
    data = b"".join(blocks)
    if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return
    found = Prefilter(["needle", "needs"])
    seen = [
        (number, page.data[start:end])
        for page in split_pages(iter(blocks))
        for number, start, end in found.candidates(page)
    ]
    expected = [(at, part) for at, line in enumerate(data.split(b"\n"), 1) for part in line.split(b"\r")
                if b"needle" in part.lower()]  # fmt: skip
    assert seen == expected


@given(st.binary(max_size=300))
def test_text_of_any_bytes_is_printable(raw: bytes) -> None:
    text = clean_text(raw.replace(b"\n", b" "))
    assert "\x1b" not in text and "\x00" not in text


def test_escapes_and_control_characters_are_removed() -> None:
    assert clean_text(b"\x1b[36m(a pid=1)\x1b[0m b\x00c\x1b]0;title\x07d\r") == "(a pid=1) bcd"


def test_parts_of_a_line_that_is_rewritten() -> None:
    assert rewritten_parts(b"plain") == (b"plain",)
    assert rewritten_parts(b"windows\r") == [b"windows"]
    assert rewritten_parts(b"\r 10%|#\r 20%|##\r\r") == [b" 10%|#", b" 20%|##"]
    many = [b"%d" % at for at in range(100)]
    assert rewritten_parts(b"\r".join(many)) == [*many[: log_lines.EDGE_PARTS], *many[-log_lines.EDGE_PARTS :]]
    assert rewritten_parts(b"\r\r") == (b"",)


def test_a_huge_line_is_cut() -> None:
    assert len(clean_text(b"x" * 10_000_000)) == log_lines.MAX_LINE_CHARS
    assert excerpt("y" * 5000 + "needle" + "z" * 5000, 5000).count("needle") == 1


def test_utf16_becomes_text() -> None:
    data = "first\nsecond ä\n".encode("utf-16")
    seen = [each for page in split_pages(iter([data[:7], data[7:]])) for each in numbered_lines(page)]
    assert seen == [(1, b"first"), (2, "second ä".encode())]


def test_a_page_sees_what_follows_it() -> None:
    blocks = [b"a\n" * 10, b"b\n" * 10, b"c\n" * 10]
    seen: list[Page] = list(split_pages(iter(blocks)))
    assert [page.data for page in seen] == blocks
    assert seen[0].lookahead(16) == b"a\na\n" + b"b\n" * 10
    assert [page.first for page in seen] == [1, 11, 21]
    assert [page.newlines for page in seen] == [10, 10, 10]


def _broken(lines: list[str], width: int) -> list[str]:
    return [line[at : at + width] for line in lines for at in range(0, max(len(line), 1), width)]


def test_wrapped_lines_are_joined_and_keep_their_numbers() -> None:
    words = ["Loading", "Rank 3 says", "é the longest of these lines is this one here"]
    lines = ["begin", *(f"{word} " + "abcdefghij" * 30 for word in words), "end"]
    broken = _broken(lines, 79)
    data = "\n".join(broken) + "\n"
    assert wrap_width(data) == 79
    page = unwrap_page(Page(data.encode(), 1, b"", len(broken)), 79)
    seen = [(number, raw.decode()) for number, raw in numbered_lines(page)]
    assert [line for _, line in seen if line] == lines
    assert all(broken[number - 1] == line[:79] for number, line in seen if line)


@pytest.mark.parametrize(
    "lines",
    [
        [f"step {at} loss 0.5 " + "x" * 70 for at in range(10, 30)],
        [
            "+" + "-" * 78 + "+",
            "| NVIDIA-SMI 550.54" + " " * 60 + "|",
            "| GPU  Name" + " " * 68 + "|",
            "+" + "=" * 78 + "+",
        ],
        ["short", "a longer one", "x" * 90, "y" * 30],
        [""],
    ],
)
def test_unwrapped_lines(lines: list[str]) -> None:
    assert wrap_width("\n".join(lines)) == 0


@pytest.mark.parametrize(
    ("name", "head", "kind"),
    [
        ("dmesg.log", "", "kernel"),
        ("x.txt", "Apr 13 14:01:40 lab-gpu10 kernel: [1.2] mce: x", "kernel"),
        ("x.txt", "[ 1234.567890] NVRM: Xid", "kernel"),
        ("x.txt", "[Fri Jul 11 10:31:02 2025] EXT4-fs error", "kernel"),
        ("pyspy_rank0.txt", "Process 12: python\nPython v3.11", "stack"),
        ("x.txt", "  PID STAT WCHAN   ELAPSED COMMAND\n1 S x", "process"),
        ("gpu_usage.csv", "a, b", "gpu"),
        ("train.log", "step 1", "log"),
        ("gpu-a100-052.log", "step 1", "log"),
    ],
)
def test_kind_of_a_file(name: str, head: str, kind: str) -> None:
    assert kind_of_file(name, head) == kind


def test_kind_of_a_line() -> None:
    assert kind_of_line("log", "Apr 13 14:01:40 lab kernel: NVRM: Xid") == "kernel"
    assert kind_of_line("stack", "x") == "stack"


_OOM = "Out of memory: Killed process 881 (python) total-vm:1kB"


@pytest.mark.parametrize(
    "before",
    [
        "completion: dmesg says: ",
        "sample 3 | prompt: ",
        "Generated text: ",
        "[response] the log says ",
        '{"step": 4, "completion": "it says ',
        "{'role': 'user', 'content': 'why ",
        "<|im_start|>user ",
        "\u2502 what is this? ",
        "(TaskRunner pid=3) completions = [",
    ],
)
def test_samples(before: str) -> None:
    at = len("(TaskRunner pid=3) ") if before.startswith("(") else 0
    assert is_quoted(before + _OOM, len(before), at)


@pytest.mark.parametrize(
    "before", ["[4411.2] ", "RuntimeError: ", "error while waiting for a completion: ", "response: ", "stderr output: "]
)
def test_lines_outside_samples(before: str) -> None:
    assert not is_quoted(before + _OOM, len(before))


def test_a_sample_is_neither_cause_nor_end(tmp_path: Path) -> None:
    sample = [f"[rank0] completion: dmesg says: {_OOM}", "completion: Training completed"]
    verdict = explain([write(tmp_path, train=[*steps(0, 9), *sample, *steps(0, 9, 9)])]).verdict
    assert verdict.cause == "benign" and verdict.confidence < 0.8, "nothing says that it ended"
    verdict = explain([write(tmp_path, train=[*steps(0, 9), *sample, *raised(0, "KeyError: 'label'")])]).verdict
    assert verdict.cause == "rank_exception_masked"


def test_a_sample_of_several_lines(tmp_path: Path) -> None:
    sample = ["[prompt] what does this mean?", _OOM, "[response] it means that", _OOM, "[ground_truth] memory"]
    verdict = explain([write(tmp_path, train=[*steps(0, 9), *sample, *steps(0, 2, 9)])]).verdict
    assert verdict.cause == "benign"
    verdict = explain([write(tmp_path, train=[*steps(0, 9), *sample, _OOM])]).verdict
    assert verdict.cause == "host_oom"
