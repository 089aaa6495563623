"""A look at the processes of this host from outside: the same eyes and the same judge as beside a run, for one who
passes by. Reads only."""

import contextlib
import subprocess
import time
from dataclasses import dataclass, field

from lockstep.watch import stacks, waits
from lockstep.watch.assemble import Alias
from lockstep.watch.beacon import read_beacon
from lockstep.watch.diagnose import diagnose
from lockstep.watch.eyes import Eyes
from lockstep.watch.folders import base_dir
from lockstep.watch.inbox import Inbox
from lockstep.watch.messages import encode
from lockstep.watch.sensible import sensible
from lockstep.watch.telling import Teller
from lockstep.watch.verdict import Patience, Verdict

STACKS_S = 3.0
"""Between two dumps of stacks, which tell the line of who stands still."""


def run_of(pid: int) -> str | None:
    """The run that a process of this host has a beacon in, None when it has none."""
    with contextlib.suppress(OSError):
        for path in base_dir().glob("*/*.beacon"):
            state = read_beacon(path, events=False)
            if state is not None and state.pid == pid:
                return state.run
    return None


@dataclass
class Onlooker:
    """Looks at a run again and again; what it says is the surer the longer it has looked."""

    run: str
    patience: Patience = field(default_factory=Patience)
    aliases: dict[str, Alias] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._eyes, self._teller = Eyes(self.run), Teller("")
        self._inbox = Inbox(aliases=self.aliases)
        self._dumped = 0.0

    def look(self) -> list[Verdict]:
        """What is wrong now, the one that explains the others first."""
        self._eyes.look({})
        self._dump()
        for said in self._teller.tell(self._eyes):
            self._inbox.receive(encode(said), time.monotonic())
        return diagnose(sensible(self._inbox.evidence(time.monotonic())), self.patience)

    def _dump(self) -> None:
        """Has the stacks of one taken who stands still."""
        now = time.monotonic()
        if now - self._dumped < STACKS_S:
            return
        for seen in self._eyes.suspects(self.patience.notice_s):
            argv = stacks.command(seen.pid)
            if argv is None:
                return
            self._dumped, taken_ns = now, time.monotonic_ns()
            with contextlib.suppress(OSError, waits.WaitTimeout, subprocess.SubprocessError):
                done = waits.run(argv, why=f"the stacks of {seen.name}", timeout_s=2.0, notice_after_s=None)
                seen.take_stacks(stacks.parse(done.stdout.encode()), taken_ns)
            seen.stack_ns = taken_ns
            return
