"""What is restarted when it fails, and how often."""

from typing import Literal

from pydantic import Field

from lockstep.config.base import Section


class Budget(Section):
    """So many restarts in so long; the next failure stops the run, which can be resumed."""

    max_restarts: int = Field(5, ge=0)
    """0 restarts nothing."""
    window_s: float = Field(3600.0, gt=0)
    """Restarts longer ago do not count."""


class Recovery(Section):
    """Restarts by role: an engine without touching the trainer, the trainer with its engines kept warm."""

    enable: bool = True
    """False stops the run at the first failure of an engine or a trainer rank."""
    policy: Budget = Budget()
    """Of the trainer ranks, which are restarted together."""
    rollout: Budget = Budget()
    """Of each engine."""
    fewer_ranks: bool = False
    """Go on with fewer trainer ranks where a replacement does not come up, again and again. The result is then that of
    the other run to about 1e-5, and not bitwise."""
    memory_copy: bool | Literal["auto"] = "auto"
    """Keep a copy of the trainer's state in shared memory after every step, so that a fault costs the present step only
    and not those since the checkpoint. `auto`: where two copies fit into memory."""
