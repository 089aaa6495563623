"""Who runs where."""

from typing import Literal

from pydantic import Field

from lockstep.config.base import Section


class LocalCluster(Section):
    """Processes on this host, spawned by a node agent."""

    kind: Literal["local"] = "local"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    orphan_grace_s: float = Field(0.0, ge=0)
    """How long workers outlive a controller that died; a run that is resumed within it keeps engines and scorers."""
    stall_limit_s: float = Field(900.0, gt=0)
    """A call whose worker shows no progress for this long fails; progress resets it."""
    notice_after_s: float = Field(10.0, gt=0)
    """A wait without progress for this long is told on the console."""
