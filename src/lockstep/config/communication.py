"""What the trainer's collectives run on."""

from typing import Literal

from lockstep.config.base import Section


class Communication(Section):
    fallback: Literal["none", "gloo"] = "none"
    """`gloo` runs the trainer's collectives on gloo where NCCL cannot be brought up, with a warning and the measured
    cost; `none` ends the run with the finding."""
