"""What a line quotes of prompts and completions is not the machine's own word, whatever a model writes of failures."""

import re

_BEGIN = re.compile(
    r"\W*(?:(?:sample|example|rollout|step|idx|index|group|generation|trajectory|no)\W*\d*\W+){0,3}"
    r"(?:(?:model|policy|gold|sampled?|generated|decoded|full)[ _])?"
    r"(?:(?:completions?|prompts?|generated[ _](?:text|output)|sampled[ _]text|decoded|ground[_ ]?truth)[\"']?\W*[:=]\W"
    r"|(?<=\[)(?:prompt|response|completion|ground_truth)\])",
    re.IGNORECASE,
)
"""How a printed sample begins."""
_INSIDE = re.compile(
    r"[\"'](?:completions?|prompts?|generated_text|question|answer|solution|response_str|input_text)[\"']: ?\[?[\"'{]"
    r"|[\"']role[\"']: ?[\"'](?:user|assistant|system|tool)[\"']|<\|im_start\|>|<think>|<answer>|\u2502"
)
"""Of a structured sample, of a chat template, or of the table that TRL prints with `log_completions`."""
_MARK = re.compile(rb"^[^\n]{0,120}?\[(?P<mark>prompt|response|ground_truth|score)\]", re.MULTILINE | re.IGNORECASE)
"""verl prints samples of several lines between such marks."""
_OPENS = (b"prompt", b"response")
_OPENED = (b"[prompt]", b"[Prompt]", b"[response]", b"[Response]")
NEAR = 8 << 10
"""Bytes before and after a line in which the marks of a sample are looked for."""


def quoted(line: str, at: int, begin: int = 0) -> bool:
    """Whether what stands at `at` of a line is part of a sample.

    Args:
        begin: Where in the line its prefixes end.
    """
    return _BEGIN.match(line, begin, max(begin, at)) is not None or _INSIDE.search(line, begin, at) is not None


def opened(before: bytes, after: bytes) -> bytes | None:
    """The line that began the sample of several lines that ends in `after`; None where there is none."""
    if not any(each in before for each in _OPENED):
        return None
    last = None
    for last in _MARK.finditer(before):  # noqa: B007
        pass
    if last is None or last["mark"].lower() not in _OPENS:
        return None
    ends = _MARK.search(after)
    return None if ends is None else last[0]


_CAUSES = re.compile(
    r"(?:[Pp]ossible|[Pp]otential|[Cc]ommon|[Ll]ikely|[Tt]ypical|[Uu]sual)(?: root)? (?:reasons?|causes?)"
    r"(?: (?:include|includes|are|is|for [^.:]{1,80}))?[:.] "
)
"""How a library begins a list of what may have happened."""


def supposed(line: str, at: int) -> bool:
    """Whether what stands at `at` of a line is one of several causes that a library lists without knowing which."""
    return _CAUSES.search(line, 0, at) is not None
