"""Finds the logs in the text of an issue: Markdown with fenced code, quotes, details and the headings of a template.

What people write around their logs is not a log: it names errors that they suspect, had earlier, or read elsewhere. Its
lines become empty, so that the numbers of the other lines stay. Only the versions it states are kept.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

_MARKDOWN_NAME = re.compile(r"\.(?:md|markdown)$", re.IGNORECASE)
_FENCE = re.compile(r"\s{0,12}(?:[-*]\s+|\d+\.\s+)?(?P<mark>`{3,}|~{3,})\s*(?P<language>[\w+-]*)")
_QUOTE = re.compile(r"\s{0,3}>\s?")
_TAG = re.compile(r"</?(?:details|summary|pre|code|br|p|sub|sup|b|i|img|div|a)\b[^>\n]{0,200}>", re.IGNORECASE)
_STRUCTURE = re.compile(
    r"\s{0,3}(?:#{1,6}\s+\S|>\s|[`~]{3,}|<details|<summary|\*\*[^*\n]{2,80}\*\*\s*$)", re.IGNORECASE
)
_TEMPLATE = re.compile(
    r"\s{0,3}(?:#{1,6}\s*|\*\*)\W{0,4}(?:describe the (?:bug|issue)|bug description|bug report|to reproduce|reproduc"
    r"|expected behaviou?r|actual behaviou?r|steps to|your (?:current )?environment|environment|system info|versions?\b"
    r"|who can help|information|tasks|relevant log|logs?\b|additional (?:context|info)|what happened|before submitting"
    r"|checklist|error (?:message|log)|stack ?trace|model input)",
    re.IGNORECASE,
)
_CODE_LANGUAGES = frozenset((
    "py", "python", "python3", "yaml", "yml", "json", "toml", "ini", "diff", "patch", "c", "cpp", "c++", "cuda", "rust",
    "go", "java", "js", "javascript", "dockerfile", "docker", "makefile", "cmake", "sql", "html", "xml", "jinja",
))  # fmt: skip
_CODE_SPAN = re.compile(r"(?<!`)`([^`\n]{16,2000})`(?!`)")
_TROUBLE = re.compile(
    r"\b[A-Z]\w*(?:Error|Exception|Died|Timeout)\b|\bNCCL (?:error|WARN)|[Tt]imed out|CUDA error|SIG[A-Z]{3,}"
)
_LOG_LINE = re.compile(
    r"\s{0,8}(?:"
    r"\[?\d{4}[-/]\d\d[-/]\d\d[T _]\d\d:\d\d|\[?\d\d:\d\d:\d\d[\s.,\]]|\[(?:rank|default|RANK)\d+\]"
    r"|[IWEF]\d{4} \d\d:\d\d"
    r"|\([A-Za-z_][\w.-]*(?: rank=\d+)? pid=\d+|[\w.-]+:\d+:\d+ \[-?\d+\] NCCL|Traceback \(most recent call"
    r"|File \"[^\"]+\", line \d+"
    r"|(?:[a-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Exit|Expired|Warning)\b(?::|$)"
    r"|(?:INFO|WARNING|WARN|ERROR|DEBUG|CRITICAL|FATAL)[ :\]|]|\[(?:INFO|WARNING|ERROR|DEBUG)\]|\[ *\d+\.\d{6}\]"
    r"|[A-Z][a-z]{2} +\d+ \d\d:\d\d:\d\d |E\d{4} |srun: |slurmstepd: |torchrun|terminate called|Killed\b"
    r"|Segmentation fault"
    r"|\{\"\w+\":|Thread 0x|Fatal Python error"
    r")"
)  # fmt: skip
"""The beginning of a line as programs print it."""
_WORD = re.compile(r"[A-Za-z][a-z']*[,.;:!?)]*")
_MIN_WORDS, _PROSE_SHARE = 4, 0.5
_VERSIONS = re.compile(
    r"(?i)(?<![\w/.-])(?P<name>py ?torch|torch|nccl|cuda|cudnn|transformers|accelerate|deepspeed|vllm|ray|trl|verl"
    r"|openrlhf|megatron(?:-core)?|flash[-_]attn|triton|peft|python|driver(?: version)?|sglang|ms-?swift)"
    r"(?P<between>[\s`*:=|v~-]{1,6}(?:version[\s`*:=|is]{1,6})?)(?P<version>\d+\.\d+(?:\.\d+){0,3}(?:[.+-]?[a-z]+\d*)*)"
)
_SPELLINGS = {"pytorch": "torch", "py torch": "torch", "driver version": "driver"}
_CAPTURE = b'{"lockstep_timeline"'
"""How a captured timeline begins (`watch/supervisor/timeline_capture.py`)."""
_MAX_BYTES = 4 << 20
"""Longer texts are logs."""


@dataclass(frozen=True, slots=True)
class IssueText:
    """The text of an issue, taken apart.

    Attributes:
        lines: One text per line of the issue: the log line, a stated version (`torch==2.6.0`), or "".
        log_lines: The number of log lines.
        prose_lines: The number of lines that are not part of a log.
        versions: The versions that the prose states, by library.
    """

    lines: tuple[str, ...]
    log_lines: int
    prose_lines: int
    versions: dict[str, str]


def log_blocks(name: str, blocks: Iterable[bytes]) -> Iterator[bytes]:
    """Passes the blocks of a source on; of an issue's text only the logs in it, and of a captured timeline nothing.

    Args:
        name: The name of the source. Only Markdown files, JSON lines and standard input are examined.
    """
    if name.endswith(".jsonl"):
        head = next(blocks := iter(blocks), b"")
        if not head.startswith(_CAPTURE):
            yield head
            yield from blocks
        return
    if name != "stdin" and not _MARKDOWN_NAME.search(name):
        yield from blocks
        return
    stream = iter(blocks)
    head = next(stream, b"")
    second = next(stream, b"")
    if second or len(head) > _MAX_BYTES:
        yield head
        yield second
        yield from stream
        return
    text = head.decode("utf-8", "replace")
    if b"\0" not in head and (name != "stdin" or is_issue_text(text)):
        yield "\n".join(take_apart(text).lines).encode()
    else:
        yield head


def is_issue_text(text: str) -> bool:
    """Whether a text is written by a person, with logs in it: it has Markdown structure or the headings of a template,
    and most of its lines outside of code are sentences. Logs may contain Markdown too, in what a model generated."""
    outside = _outside_of_fences(text.splitlines())
    lines = [each for each in outside if each.strip()]
    if any(_TEMPLATE.match(each) for each in lines):
        return sum(bool(_LOG_LINE.match(each)) for each in lines[:5]) <= 2
    prose = sum(_is_prose(each) for each in lines)
    structured = any(_STRUCTURE.match(each) for each in text.splitlines())
    return bool(lines) and structured and prose >= _PROSE_SHARE * sum(not _STRUCTURE.match(each) for each in lines)


def take_apart(text: str) -> IssueText:
    """Separates logs from prose."""
    found: list[str] = []
    versions: dict[str, str] = {}
    counts = {"log": 0, "prose": 0}
    in_traceback = False
    for line, language in _marked_lines(text.splitlines()):
        if language is None:
            in_traceback = _continues_traceback(line, in_traceback)
            kept = line if in_traceback or _LOG_LINE.match(line) else _log_of_prose(line, versions)
            is_log = bool(kept) and not kept.startswith(_STATED)
        else:
            kept, is_log = line, bool(line.strip())
        found.append(kept.removeprefix(_STATED))
        counts["log"] += is_log
        counts["prose"] += not is_log and bool(line.strip())
    return IssueText(tuple(found), counts["log"], counts["prose"], versions)


_STATED = "\0"
"""Marks a line that states versions."""


def _continues_traceback(line: str, inside: bool) -> bool:
    """Whether a line outside of code belongs to a traceback: indented lines after its header, up to the exception."""
    if line.lstrip().startswith("Traceback (most recent call"):
        return True
    return inside and (line.startswith((" ", "\t")) or not line.strip())


def _log_of_prose(line: str, versions: dict[str, str]) -> str:
    """Returns what counts of a line of prose: error messages in backticks, or else the versions it states."""
    quoted = [each for each in _CODE_SPAN.findall(line) if _TROUBLE.search(each) and " " in each]
    if quoted:
        return " ".join(quoted)
    stated = []
    for each in _VERSIONS.finditer(_TAG.sub(" ", line)):
        name = each["name"].lower()
        name = _SPELLINGS.get(name, name)
        versions.setdefault(name, each["version"])
        stated.append(f"{name}=={each['version']}")
    return _STATED + " ".join(stated) if stated else ""


def _marked_lines(lines: Iterable[str]) -> Iterator[tuple[str, str | None]]:
    """Yields each line without marks of quotes, and the language of the code it is in: None outside of code.

    Code in a programming language is code only while it looks like a log: a traceback in a block of Python is one.
    """
    fence, language = "", ""
    for raw in lines:
        line = raw
        while (quote := _QUOTE.match(line)) and not line.lstrip().startswith(">>>"):
            line = line[quote.end() :]
        found = _FENCE.match(line)
        if fence:
            if found and found["mark"][0] == fence[0] and len(found["mark"]) >= len(fence) and not found["language"]:
                fence = ""
                yield "", None
                continue
            yield line, None if language in _CODE_LANGUAGES else language
        elif found and not line[found.end() :].strip().endswith("`"):
            fence, language = found["mark"], found["language"].lower()
            yield "", None
        else:
            yield _TAG.sub("", line), None


def _outside_of_fences(lines: Iterable[str]) -> list[str]:
    found, fence = [], ""
    for line in lines:
        mark = _FENCE.match(_QUOTE.sub("", line, count=1))
        if mark and (not fence or mark["mark"].startswith(fence)):
            fence = "" if fence else mark["mark"]
        elif not fence:
            found.append(line)
    return found


def _is_prose(line: str) -> bool:
    """Whether a line is (a part of) a sentence: several words, and more words than anything else."""
    if _LOG_LINE.match(line):
        return False
    parts = line.strip().lstrip("#>*-0123456789. ").split()
    words = sum(bool(_WORD.fullmatch(each.strip("`*_\"'("))) for each in parts)
    return words >= _MIN_WORDS and words >= 0.6 * len(parts)
