"""Conversations with an environment as lines of JSON."""

from lockstep.data.samples import Episode
from lockstep.ledger import values


def dumped(episode: Episode | None, request: str) -> str | None:
    """None where there was no environment. TypeError names the request whose messages cannot be written."""
    if episode is None:
        return None
    fields = [episode.messages, episode.rewards, episode.ended, episode.metrics]
    return values.dumps(fields, f"episode of completion {request}")


def loaded(text: str | None) -> Episode | None:
    return None if text is None else Episode(*values.loads(text))
