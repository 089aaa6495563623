"""What is watched for beside the run, and what happens when it stands still."""

from typing import Literal

from pydantic import Field

from lockstep.config.base import Section


class Watch(Section):
    """A supervisor beside the run that says who is waited for, since when, and in which line."""

    enable: bool = True
    notice_s: float = Field(3.0, gt=0)
    """A wait in which nothing moved for so long is told: who waits for whom. Nothing is done about it."""
    confirm_after_s: float = Field(40.0, gt=0)
    """An alive process that others wait for is to blame after so long without CPU, I/O or progress, in the same line
    all the time; later where the same stage has taken longer before. What is dead, stopped or in a deadlock is to blame
    at once."""
    on_stall: Literal["report", "dump", "recover"] = "recover"
    """Of what is confirmed: an incident is written (`report`), with native stacks (`dump`), or it is also handed to
    `recovery`, and who waits for it in a collective is freed (`recover`)."""
