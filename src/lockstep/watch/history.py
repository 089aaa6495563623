"""How long the stages of each role have taken so far: what a stage that lasts is held against."""

from dataclasses import dataclass, field


@dataclass
class History:
    """The longest of each (role, stage). Seconds."""

    longest: dict[tuple[str, str], float] = field(default_factory=dict)

    def stage_ended(self, role: str, stage: str, since_ns: int, until_ns: int) -> None:
        """A stage was left. Who looks twice a second may have missed others in between: then it seems longer than it
        was, which accuses nobody."""
        if stage and until_ns > since_ns > 0:
            key = (role, stage)
            self.longest[key] = max(self.longest.get(key, 0.0), (until_ns - since_ns) / 1e9)

    def expected_s(self, role: str, stage: str) -> float:
        """The longest so far, NaN for a stage that nobody of the role has finished yet."""
        return self.longest.get((role, stage), float("nan"))
