"""Splits byte streams into pages of whole lines and decodes lines into clean text.

Only a newline ends a line, and lines are numbered from 1. A line that a progress bar rewrites with carriage returns
is one line, whose parts are examined one by one.
"""

import codecs
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

_FILE_NAMES = (
    ("kernel", re.compile(r"(?:^|[/_.-])(?:dmesg|kern|syslog|journal|messages)(?:[/_.-]|$)", re.IGNORECASE)),
    ("stack", re.compile(r"(?:py-?spy|faulthandler|gdb|stack|bt)(?:[/_.-]|$)", re.IGNORECASE)),
    ("process", re.compile(r"(?:^|[/_.-])(?:ps|top|htop|pstree)(?:[/_.-]|$)", re.IGNORECASE)),
    ("gpu", re.compile(r"(?:nvidia-?smi|dcgm|gpu_?(?:usage|csv|util|trn|log)?)", re.IGNORECASE)),
    ("environment", re.compile(r"(?:^|[/_.-])(?:env|printenv|pip|conda|collect_env)(?:[/_.-]|$)", re.IGNORECASE)),
)
_DMESG_DATE = r"^\[[A-Z][a-z]{2} [A-Z][a-z]{2} [ \d]\d [\d:]{8} \d{4}\] "
"""The start of a line of `dmesg -T`."""
_FILE_HEADS = (
    (
        "kernel",
        re.compile(rf"^\[ *\d+\.\d+\] |{_DMESG_DATE}|^[A-Z][a-z]{{2}} +\d+ [\d:]{{8}} \S+ kernel:", re.MULTILINE),
    ),
    ("stack", re.compile(r"^Process \d+: |^Thread (?:0x[0-9a-f]+|\d+) \(", re.MULTILINE)),
    ("process", re.compile(r"^ {0,40}(?:USER {1,40})?PID .{0,400}\b(?:COMMAND|CMD)\b", re.MULTILINE)),
    ("gpu", re.compile(r"^timestamp, |\| NVIDIA-SMI \d+", re.MULTILINE)),
)
_PROCESS_LINE = re.compile(r"^\s*(?:[a-z_][\w-]*\s+)?\d+\s+(?:\d+\s+)?(?:[\d.]+\s+){0,4}\S*\s*[RSDZTI][sl<NL+]*\s+\S+")
_KERNEL_LINE = re.compile(rf" kernel: |\bNVRM: |^\[ *\d+\.\d{{6}}\] |{_DMESG_DATE}")
_HEAD_BYTES = 2_000
"""Only headings in these first bytes decide the kind of a file: the log of a job may contain a process list."""


def kind_of_file(name: str, head: str) -> str:
    """Returns the kind of a file according to its first lines or its name; otherwise `log`."""
    for kind, pattern in _FILE_HEADS:
        found = pattern.search(head[:_HEAD_BYTES])
        if found and found.start() < _HEAD_BYTES // 8:
            return kind
    for kind, pattern in _FILE_NAMES:
        if kind != "gpu" and pattern.search(name.rsplit("/", 1)[-1].rsplit(".", 1)[0]):
            return kind
    return "gpu" if name.endswith(".csv") and _FILE_NAMES[3][1].search(name) else "log"


def kind_of_line(kind: str, line: str) -> str:
    """Returns the kind of a line in a file of the given kind."""
    if _KERNEL_LINE.search(line):
        return "kernel"
    return "process" if _PROCESS_LINE.match(line) else kind


MAX_LINE_CHARS = 16 << 10
"""Longer lines, or parts of lines, are cut."""
EDGE_PARTS = 6
"""Number of parts searched for counters at both ends of a line that was rewritten with `\\r`."""
_NEWLINE = ord("\n")
LOOKAHEAD_BYTES = 64 << 10
"""Bytes of the next page that are kept with a page, for tracebacks that cross the page boundary."""
_ESCAPES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?|\x1b[@-Z\\-_]?")
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069\ufeff]")


@dataclass(frozen=True, slots=True)
class Page:
    """Whole lines of a source.

    Attributes:
        data: The lines.
        first: Number of the first line.
        after: Up to `LOOKAHEAD_BYTES` of the following data.
        newlines: Number of newlines in the page.
    """

    data: bytes
    first: int
    after: bytes = b""
    newlines: int = 0

    def lookahead(self, start: int) -> bytes:
        """Returns the data from byte `start` on, as far as a traceback may reach."""
        data = self.data[start : start + LOOKAHEAD_BYTES]
        return data if len(data) == LOOKAHEAD_BYTES else data + self.after


def split_pages(blocks: Iterable[bytes]) -> Iterator[Page]:
    """Splits a stream into pages of whole lines. Converts UTF-16 and UTF-32 with a byte order mark to UTF-8."""
    incomplete: list[bytes | memoryview] = []
    waiting, number = b"", 1
    for block in _decode_to_utf8(blocks):
        end = block.rfind(b"\n") + 1
        if not end and sum(map(len, incomplete)) < MAX_LINE_CHARS * 256:
            incomplete.append(block)
            continue
        end = end or block.rfind(b"\r") + 1 or len(block)
        page = b"".join((*incomplete, memoryview(block)[:end]))
        incomplete = [block[end:]]
        if waiting:
            newlines = count_newlines(waiting)
            yield Page(waiting, number, page[:LOOKAHEAD_BYTES], newlines)
            number += newlines
        waiting = page
    rest = b"".join(incomplete)
    if waiting:
        newlines = count_newlines(waiting)
        yield Page(waiting, number, rest[:LOOKAHEAD_BYTES], newlines)
        number += newlines
    if rest:
        yield Page(rest, number, b"", count_newlines(rest))


def count_newlines(data: bytes) -> int:
    """Counts newlines; several times as fast as `bytes.count` if lines are short."""
    return int(np.count_nonzero(np.frombuffer(data, np.uint8) == _NEWLINE))


def _decode_to_utf8(blocks: Iterable[bytes]) -> Iterator[bytes]:
    stream = iter(blocks)
    head = next(stream, b"")
    name = ""
    for mark, encoding in ((codecs.BOM_UTF32_LE, "utf-32"), (codecs.BOM_UTF32_BE, "utf-32"),
                           (codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16")):  # fmt: skip
        if head.startswith(mark):
            name = encoding
            break
    if not name:
        yield head
        yield from stream
        return
    decoder = codecs.getincrementaldecoder(name)(errors="replace")
    yield decoder.decode(head).encode()
    for block in stream:
        yield decoder.decode(block).encode()
    yield decoder.decode(b"", final=True).encode()


def clean_text(raw: bytes) -> str:
    """Decodes a line, or a part of one, and removes escape sequences and control characters."""
    text = raw[: MAX_LINE_CHARS * 2].decode("utf-8", "replace")[:MAX_LINE_CHARS]
    if "\x1b" in text:
        text = _ESCAPES.sub("", text)
    if not text.isprintable():
        text = _CONTROLS.sub("", text)
    return text


def rewritten_parts(raw: bytes) -> Sequence[bytes]:
    """Returns the successive contents of a line rewritten with `\\r`; if there are many, `EDGE_PARTS` at both ends."""
    if b"\r" not in raw:
        return (raw,)
    found = [each for each in raw.split(b"\r") if each]
    return (found if len(found) <= 2 * EDGE_PARTS else [*found[:EDGE_PARTS], *found[-EDGE_PARTS:]]) or (b"",)


_MIN_WIDTH, _MAX_WIDTH, _MIN_CUT_LINES = 60, 400, 3
_DIGITS = re.compile(r"\d+")


def wrap_width(head: str) -> int:
    """Returns the width at which a terminal or a mail program wrapped the lines of a file; 0 if they are not wrapped.

    In a wrapped file no line is longer than that width, and several different lines have exactly that length and end
    within a word.
    """
    lines = head.split("\n")
    width = max(map(len, lines))
    if "\r" in head.replace("\r\n", "") or not _MIN_WIDTH <= width <= _MAX_WIDTH:
        return 0
    cut = [one for one, other in pairwise(lines) if len(one) == width and one[-1].isalnum() and other[:1].isalnum()]
    return width if len({_DIGITS.sub("#", each)[:_MIN_WIDTH] for each in cut}) >= _MIN_CUT_LINES else 0


def unwrap_page(page: Page, width: int) -> Page:
    """Joins wrapped lines; empty lines replace the continuation lines, so that line numbers stay valid."""
    joined: list[bytes] = []
    replaced, continues = 0, False
    for line in page.data.split(b"\n"):
        if continues:
            joined[-1] += line
            replaced += 1
        else:
            joined += [*[b""] * replaced, line]
            replaced = 0
        continues = len(line.decode("utf-8", "replace")) == width
    return replace(page, data=b"\n".join([*joined, *[b""] * replaced]))


def excerpt(text: str, at: int = 0, most: int = 400) -> str:
    """Returns the part of a line that evidence quotes: at most `most` characters, around `at` if that is far right."""
    if len(text) > most:
        begin = 0 if at < most * 3 // 4 else at - most // 4
        text = text[begin : begin + most]
    return text.strip()


def numbered_lines(page: Page, most: int | None = None) -> Iterator[tuple[int, bytes]]:
    """Yields number and bytes of each line of a page, or of each line that begins in the first `most` bytes."""
    at, number = 0, page.first
    stop = len(page.data) if most is None else min(most, len(page.data))
    while at < stop:
        end = page.data.find(b"\n", at)
        end = len(page.data) if end < 0 else end
        yield number, page.data[at:end]
        at, number = end + 1, number + 1


_SAMPLE_BEGIN = re.compile(
    r"\W{0,40}(?:(?:sample|example|rollout|step|idx|index|group|generation|trajectory|no)\W{0,8}\d{0,9}\W{1,8}){0,3}"
    r"(?:(?:model|policy|gold|sampled?|generated|decoded|full)[ _])?"
    r"(?:(?:completions?|prompts?|generated[ _](?:text|output)|sampled[ _]text|decoded|ground[_ ]?truth)[\"']?"
    r"\W{0,8}[:=]\W"
    r"|(?<=\[)(?:prompt|response|completion|ground_truth)\])",
    re.IGNORECASE,
)
"""The start of a printed sample. Its repeats are bounded: a line could make nested ones try every way to divide it."""
_STRUCTURED_SAMPLE = re.compile(
    r"[\"'](?:completions?|prompts?|generated_text|question|answer|solution|response_str|input_text)[\"']: ?\[?[\"'{]"
    r"|[\"']role[\"']: ?[\"'](?:user|assistant|system|tool)[\"']|<\|im_start\|>|<think>|<answer>|\u2502"
)
"""Part of a structured sample, of a chat template, or of the table that TRL prints with `log_completions`."""
_SAMPLE_MARK = re.compile(
    rb"^[^\n]{0,120}?\[(?P<mark>prompt|response|ground_truth|score)\]", re.MULTILINE | re.IGNORECASE
)
"""A mark between which verl prints multi-line samples."""
_OPENING_MARKS = (b"prompt", b"response")
_OPENING_TEXTS = (b"[prompt]", b"[Prompt]", b"[response]", b"[Response]")
SAMPLE_BYTES = 8 << 10
"""Bytes before and after a line that are searched for the marks of a sample."""


def is_quoted(line: str, at: int, begin: int = 0) -> bool:
    """Whether position `at` of a line is inside a printed sample.

    Args:
        begin: Where the line's prefixes end.
    """
    return (
        _SAMPLE_BEGIN.match(line, begin, max(begin, at)) is not None
        or _STRUCTURED_SAMPLE.search(line, begin, at) is not None
    )


def sample_start(before: bytes, after: bytes) -> bytes | None:
    """Returns the line that starts the multi-line sample which ends in `after`; None if there is none."""
    if not any(each in before for each in _OPENING_TEXTS):
        return None
    last = None
    for last in _SAMPLE_MARK.finditer(before):  # noqa: B007
        pass
    if last is None or last["mark"].lower() not in _OPENING_MARKS:
        return None
    ends = _SAMPLE_MARK.search(after)
    return None if ends is None else last[0]


_CAUSE_LIST = re.compile(
    r"(?:[Pp]ossible|[Pp]otential|[Cc]ommon|[Ll]ikely|[Tt]ypical|[Uu]sual)(?: root)? (?:reasons?|causes?)"
    r"(?: (?:include|includes|are|is|for [^.:]{1,80}))?[:.] "
    r"|\b(?:can|may|might|could|would|will) (?:cause|lead to|result in|trigger|produce|raise) (?:\w+ ){0,4}"
    r"errors? (?:like|such as) "
)
"""How a library introduces a list of possible causes, or what may follow from a setting."""


def is_supposition(line: str, at: int) -> bool:
    """Whether position `at` of a line is in a list of possible causes or consequences, printed by a library that does
    not know which of them applies."""
    return _CAUSE_LIST.search(line, 0, at) is not None


_NEXT_TRY = r"(?:second|third|next|last|other|\d{1,2}(?:nd|rd|th)) (?:try|attempt|request|call)"
_OVERCOME = re.compile(
    rf"(?i)\b{_NEXT_TRY} (?:worked|succeeded|passed|went through|was (?:ok|fine|answered))\b"
    rf"|\b(?:worked|succeeded|recovered|answered|reconnected) (?:after|on|at|with) (?:the |a )?"
    rf"(?:{_NEXT_TRY}|attempt|retry|\d+ (?:attempts|retries|tries))\b|\bretry (?:worked|succeeded)\b"
)
"""How a line tells that what failed at first was done at last."""
RETRIES = r"\bRetrying \(Retry\(total=[1-9].*"
"""urllib3's report that it will try again, in which it names the exception. If that fails too, it raises another."""
_RETRIES = re.compile(RETRIES)


def is_overcome(line: str, role: str) -> bool:
    """Whether a line itself says that the failure which a rule of this role finds in it was overcome, or, of a rule for
    what a failure leads to, that its process tries again."""
    if role == "victim" and _RETRIES.search(line):
        return True
    return role in ("cause", "sign", "victim") and _OVERCOME.search(line) is not None
