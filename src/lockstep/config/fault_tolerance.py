"""What the supervisor watches for, and what is restarted after a failure."""

from typing import Literal

from pydantic import Field

from lockstep.config.section import Section


class RestartBudget(Section):
    """So many restarts in so long; the next failure stops the run, which can be resumed."""

    max_restarts: int = Field(5, ge=0)
    """0 restarts nothing."""
    window_s: float = Field(3600.0, gt=0)
    """Restarts longer ago do not count."""


class RecoveryConfig(Section):
    """Restarts by role: an engine without touching the trainer, the trainer with its engines kept warm."""

    enable: bool = True
    """False stops the run at the first failure of an engine or a trainer rank."""
    policy: RestartBudget = RestartBudget()
    """Of the trainer ranks, which are restarted together."""
    rollout: RestartBudget = RestartBudget()
    """Of each engine."""
    fewer_ranks: bool = False
    """Go on with fewer trainer ranks where a replacement does not come up, again and again. The result is then that of
    the other run to about 1e-5, and not bitwise."""
    memory_copy: bool | Literal["auto"] = "auto"
    """Keep a copy of the trainer's state in shared memory after every step, so that a fault costs the present step only
    and not those since the checkpoint. `auto`: where two copies fit into memory."""


class WatchConfig(Section):
    """A supervisor beside the run that says who is waited for, since when, and in which line."""

    enable: bool = True
    notice_s: float = Field(3.0, gt=0)
    """A wait in which nothing moved for so long is told: who waits for whom. Nothing is done about it."""
    confirm_after_s: float = Field(40.0, gt=0)
    """An alive process that others wait for is to blame after so long without CPU, I/O or progress, in the same line
    all the time; later where the same stage has taken longer before. What is dead, stopped or in a deadlock is to blame
    at once."""
    on_stall: Literal["report", "dump", "recover"] = "recover"
    """Of what is confirmed: an incident is written (`environment_report`), with native stacks (`dump`), or it is also
    handed to
    `recovery`, and who waits for it in a collective is freed (`recover_folder`)."""
