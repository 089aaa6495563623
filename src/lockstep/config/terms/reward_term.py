"""What all reward terms have in common. Few lines, because the modules of the terms import it, and not each other."""

from lockstep.config.section import Section


class RewardTermSection(Section):
    """The fields of every reward term."""

    weight: float = 1.0
    name: str | None = None
    """Name in the metrics; the kind or the function's name when absent."""
