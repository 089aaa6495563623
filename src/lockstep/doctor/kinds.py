"""Of what kind a file or a line is: a kernel's log, a stack, a list of processes, ..."""

import re

_NAMES = (
    ("kernel", re.compile(r"(?:^|[/_.-])(?:dmesg|kern|syslog|journal|messages)(?:[/_.-]|$)", re.IGNORECASE)),
    ("stack", re.compile(r"(?:py-?spy|faulthandler|gdb|stack|bt)(?:[/_.-]|$)", re.IGNORECASE)),
    ("process", re.compile(r"(?:^|[/_.-])(?:ps|top|htop|pstree)(?:[/_.-]|$)", re.IGNORECASE)),
    ("gpu", re.compile(r"(?:nvidia-?smi|dcgm|gpu_?(?:usage|csv|util|trn|log)?)", re.IGNORECASE)),
    ("environment", re.compile(r"(?:^|[/_.-])(?:env|printenv|pip|conda|collect_env)(?:[/_.-]|$)", re.IGNORECASE)),
)
_DATED = r"^\[[A-Z][a-z]{2} [A-Z][a-z]{2} [ \d]\d [\d:]{8} \d{4}\] "
"""How `dmesg -T` begins a line."""
_HEADS = (
    ("kernel", re.compile(rf"^\[ *\d+\.\d+\] |{_DATED}|^[A-Z][a-z]{{2}} +\d+ [\d:]{{8}} \S+ kernel:", re.MULTILINE)),
    ("stack", re.compile(r"^Process \d+: |^Thread (?:0x[0-9a-f]+|\d+) \(", re.MULTILINE)),
    ("process", re.compile(r"^ *(?:USER +)?PID +.*\b(?:COMMAND|CMD)\b", re.MULTILINE)),
    ("gpu", re.compile(r"^timestamp, |\| NVIDIA-SMI \d+", re.MULTILINE)),
)
_PROCESS_LINE = re.compile(r"^\s*(?:[a-z_][\w-]*\s+)?\d+\s+(?:\d+\s+)?(?:[\d.]+\s+){0,4}\S*\s*[RSDZTI][sl<NL+]*\s+\S+")
_KERNEL_LINE = re.compile(rf" kernel: |\bNVRM: |^\[ *\d+\.\d{{6}}\] |{_DATED}")
_ENOUGH = 2_000
"""Bytes of a file that a heading decides for: a job's log may hold a list of processes, but is none."""


def of_file(name: str, head: str) -> str:
    """The kind that its name or, of a short file, its first lines show; `log` otherwise."""
    for kind, pattern in _HEADS:
        found = pattern.search(head[:_ENOUGH])
        if found and found.start() < _ENOUGH // 8:
            return kind
    for kind, pattern in _NAMES:
        if kind != "gpu" and pattern.search(name.rsplit("/", 1)[-1].rsplit(".", 1)[0]):
            return kind
    return "gpu" if name.endswith(".csv") and _NAMES[3][1].search(name) else "log"


def of_line(kind: str, line: str) -> str:
    """The kind of a line in a file of a kind."""
    if _KERNEL_LINE.search(line):
        return "kernel"
    return "process" if _PROCESS_LINE.match(line) else kind
