"""What the kernel's log says about GPUs, memory, the PCI bus and processes that it killed."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator

from lockstep.doctor.check.facts import Kernel, KernelEvent
from lockstep.doctor.check.system import System, Unavailable

ASK_S = 2.0
MOST_LINES = 200_000
_KINDS: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("xid", re.compile(r"NVRM: Xid \((?:PCI:)?(?P<device>[0-9A-Fa-f:.]+)\): (?P<code>\d+)")),
    ("sxid", re.compile(r"nvidia-nvswitch\S*: SXid \((?:PCI:)?(?P<device>[0-9A-Fa-f:.]+)\): (?P<code>\d+)")),
    ("bus", re.compile(r"NVRM: GPU (?:at PCI:)?(?P<device>[0-9A-Fa-f:.]+): GPU has fallen off the bus")),
    ("driver", re.compile(r"NVRM: (?:API mismatch|RmInitAdapter failed|No NVIDIA GPU found)")),
    ("oom", re.compile(r"(?:Out of memory|Memory cgroup out of memory): Killed process \d+ \((?P<device>[^)]*)\)")),
    ("memory", re.compile(r"EDAC \S+: \d+ UE |mce: \[Hardware Error\].*Uncorrected|Memory failure: 0x")),
    ("pcie", re.compile(r"(?P<device>[0-9a-f]{4}:[0-9a-f:.]+): PCIe Bus Error: severity=Uncorrect")),
    ("nic", re.compile(r"mlx5_core (?P<device>[0-9a-f:.]+).*(?:health compromised|internal error|Link down)")),
    ("hung", re.compile(r"INFO: task (?P<device>\S+?):\d+ blocked for more than")),
)


def gather_kernel(system: System, bound_s: float = ASK_S) -> Kernel:
    """Of the current start of this host: `dmesg`, else the journal.

    Raises:
        Unavailable: neither may be read.
    """
    silent = []
    for command in (["dmesg"], ["journalctl", "--dmesg", "--boot", "--no-pager", "--quiet", "--output=short-iso"]):
        try:
            ran = system.run(command, bound_s)
        except (Unavailable, TimeoutError) as error:
            silent.append(str(error))
            continue
        if ran.code == 0 and ran.out.strip():
            return Kernel(list(events(ran.out.splitlines()[-MOST_LINES:])), command[0])
        silent.append(f"{command[0]}: {(ran.err or ran.out or 'says nothing').strip().splitlines()[0][:120]}")
    raise Unavailable(f"{'; '.join(silent)} (as root it can be read, or with kernel.dmesg_restrict=0)")


def events(lines: Iterable[str]) -> Iterator[KernelEvent]:
    """Those that matter, the same kind on the same device once, with how often and the last line."""
    counts: Counter[tuple[str, int | None, str]] = Counter()
    last: dict[tuple[str, int | None, str], str] = {}
    for line in lines:
        for kind, pattern in _KINDS:
            if (found := pattern.search(line)) is None:
                continue
            groups = found.groupdict()
            code = groups.get("code")
            key = kind, int(code) if code else None, groups.get("device") or ""
            counts[key] += 1
            last[key] = line[found.start() :].strip()[:300]
            break
    for (kind, number, device), count in counts.items():
        yield KernelEvent(kind, last[kind, number, device], number, device, count)
