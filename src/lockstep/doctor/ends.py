"""Who ended first with a fault of its own, from exit codes and signals that launchers report."""

from collections.abc import Iterator
from dataclasses import replace

from lockstep.doctor.sightings import Sighting
from lockstep.doctor.story import Story, order
from lockstep.watch.verdict import Culprit

_TERMINATED = ("SIGTERM", "Terminated", "-15", "15", "143")
_KILLED = ("SIGKILL", "Killed", "-9", "137", "Out Of Memory")


def first_to_fall(story: Story) -> Iterator[Culprit]:
    """Killed ones before others; those that the launcher ended never."""
    exits = [each for each in story.facts("exit") if not _ended_by_launcher(each)]
    killed = [each for each in exits if _code(each) in _KILLED]
    first = killed or sorted(story.facts("first_failure"), key=order)[:1] or exits[:1]
    for each in first:
        task = each.fields.get("task", "")
        rank = int(task) if task.isdigit() else story.rank(each)
        if rank is not None:
            yield replace(of_rank(rank, story), host=story.hosts.get(rank, each.fields.get("host", "")))
        elif each.fields.get("host"):
            yield Culprit(None, host=each.fields["host"], name=each.fields["host"])


def by_signal(story: Story) -> bool:
    """A signal ended somebody, not the launcher's: that has causes of its own."""
    exits = [each for each in story.facts("exit") if not _ended_by_launcher(each)]
    return any(_code(each).startswith(("-", "SIG")) or _code(each) in _KILLED for each in exits)


def of_rank(rank: int, story: Story) -> Culprit:
    """A rank with its host and the line that its first traceback ended in."""
    return Culprit(rank, host=story.hosts.get(rank, ""), where=story.places.get(rank, ""))


def _code(seen: Sighting) -> str:
    return seen.fields.get("signal") or seen.fields.get("code", "")


def _ended_by_launcher(seen: Sighting) -> bool:
    return _code(seen) in (*_TERMINATED, "0", "")
