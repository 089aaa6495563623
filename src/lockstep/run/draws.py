"""Which prompts a step gets."""

from lockstep.data.prompts import PromptSource
from lockstep.data.samples import Prompt
from lockstep.ledger.ledger import Ledger


class PromptDraws:
    """Hands out every position of the data once.

    Without replacement of groups, a step's prompts follow from its number. With it, nobody knows beforehand how many a
    step will need, so the ledger notes each draw before it is used: a resumed run gives every step the prompts it had.

    Args:
        per_step: prompts of a step's first round.
        replaced: whether steps may need more rounds.
    """

    def __init__(self, source: PromptSource, ledger: Ledger, per_step: int, replaced: bool) -> None:
        self.source, self.ledger = source, ledger
        self.per_step, self.replaced = per_step, replaced

    def draw(self, step: int, round: int = 0, count: int | None = None) -> list[Prompt]:
        """The prompts of a round of a step: `count` of them, or as many as it was given before a restart."""
        wanted = self.per_step if count is None else count
        if not self.replaced:
            return self.source.take(step * self.per_step, wanted)
        return self.source.take(*self.ledger.draw(step, round, wanted))
