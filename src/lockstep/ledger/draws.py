"""Which positions of the data a step was given, where that does not follow from the step's number."""

from lockstep.ledger.index import Transaction


def draw(transaction: Transaction, step: int, round: int, count: int) -> tuple[int, int]:
    """(first position, number of positions) that a round of a step has: those it was given before, or `count` new
    ones behind all that were ever given."""
    found = transaction.execute("SELECT start, count FROM draws WHERE step = ? AND round = ?", step, round)
    if found:
        return int(found[0][0]), int(found[0][1])
    start = int(transaction.execute("SELECT coalesce(max(start + count), 0) FROM draws")[0][0])
    transaction.put("draws", step=step, round=round, start=start, count=count)
    return start, count
