"""What the supervisor watches for, and what is restarted after a failure."""

from typing import Literal

from pydantic import Field

from lockstep.config.section import Section


class RestartBudget(Section):
    """The number of restarts within a period; the next failure stops the run, which can be resumed."""

    max_restarts: int = Field(5, ge=0)
    """0 disables restarts."""
    window_s: float = Field(3600.0, gt=0)
    """Only restarts within this period count."""


class RecoveryConfig(Section):
    """Restarts by role: an engine or the reference without the trainer, the trainer while all others keep running."""

    enable: bool = True
    """False stops the run at the first failure of an engine, a trainer rank or a rank of a served model."""
    policy: RestartBudget = RestartBudget()
    """For the trainer ranks, which are restarted together; each trained role has a budget of this size."""
    rollout: RestartBudget = RestartBudget()
    """For each engine."""
    reference: RestartBudget = RestartBudget()
    """For the ranks of the reference model, which are restarted together."""
    reward_model: RestartBudget = RestartBudget()
    """For the ranks of each reward model, which are restarted together."""
    fewer_ranks: bool = False
    """Continue with fewer trainer ranks when a replacement repeatedly does not start. The results then equal those of a
    run without a fault to about 1e-5 instead of bitwise."""
    memory_copy: bool | Literal["auto"] = "auto"
    """Keep a copy of the trainer's state in shared memory after every step, so that a fault repeats only the current
    step instead of all steps since the checkpoint. `auto`: if two copies fit into memory."""


class WatchConfig(Section):
    """A supervisor process: it reports which process the others wait for, since when, and in which line."""

    enable: bool = True
    notice_s: float = Field(3.0, gt=0)
    """Report a wait in which nothing has moved for this long. No action is taken."""
    confirm_after_s: float = Field(40.0, gt=0)
    """Blame a live process that others wait for after this long without CPU, I/O or progress, in the same line of code;
    later if the same stage has taken longer before. A process that is dead, stopped or in a deadlock is blamed at
    once."""
    on_stall: Literal["report", "dump", "recover"] = "recover"
    """The action on a confirmed stall: write an incident (`report`), with native stacks (`dump`), or also pass it to
    `recovery` and release the ranks that wait for it in a collective (`recover`)."""
