"""Applies a dump's tables of communicators: `pg_config` lists their members, `pg_status` holds their counters.

`pg_config` is keyed by name and `pg_status` by `pg_id`, the number of communicators that the process had created
before. Torch's names are numbers over all ranks, so a process has created its communicators in the order of their
names.
"""

import re
from collections.abc import Collection
from itertools import pairwise
from typing import Any

from lockstep.watch.dumps.dump_parser import MAX_RANKS, MAX_TEXT_CHARS, bounded_text
from lockstep.watch.dumps.traces import CommunicatorTrace, PendingEntry, RankTrace

_MAX_MEMBERS_CHARS = 8 * MAX_RANKS
"""The longest member list, in characters."""


def apply_config(trace: RankTrace, config: Any) -> None:
    """Fills in the members of communicators from the dump's configuration."""
    if not isinstance(config, dict):
        return
    by_name: dict[str, list[CommunicatorTrace]] = {}
    for group in trace.groups:
        by_name.setdefault(group.name, []).append(group)
    for name, settings in config.items():
        if not isinstance(settings, dict) or not isinstance(name, str):
            continue
        members = _member_list(settings.get("ranks"))
        if not members:
            continue
        largest = max(map(int, re.findall(r"\d+", members)))
        if largest >= MAX_RANKS:
            continue
        trace.world = max(trace.world, 1 + largest)
        if not name:
            continue  # gloo's entry has no name, so its communicator is unknown
        name = name[:MAX_TEXT_CHARS]
        groups = by_name.get(name)
        if not groups:
            entered = 0 if trace.complete else -1
            trace.groups.append(
                CommunicatorTrace(name, bounded_text(settings.get("desc")), entered=entered, completed=entered)
            )
            groups = by_name[name] = trace.groups[-1:]
        for group in groups:
            group.members = members


def apply_status(trace: RankTrace, status: Any) -> None:
    """Fills in the counters of communicators without entries (a dump of active entries omits completed ones, a full one
    may have overwritten them), and detects communicators with unrecorded calls."""
    if not isinstance(status, dict) or not status:
        return
    by_number = {int(key): each for key, each in status.items() if isinstance(key, str) and _is_number(key)}
    _number_groups(trace, by_number)
    without_number = [group for group in trace.groups if group.number < 0]
    unmatched = by_number.keys() - {group.number for group in trace.groups}
    if len(without_number) == len(unmatched) == 1:
        without_number[0].number = unmatched.pop()
    tables = [each for each in by_number.values() if isinstance(each, dict)]
    trace.timed |= any(_parse_int(each.get("last_started_collective")) > 0 for each in tables)
    without_entries: list[tuple[CommunicatorTrace, int, int]] = []
    may_be_full = trace.only_active and trace.contiguous
    for group in trace.groups:
        counters = by_number.get(group.number)
        if not isinstance(counters, dict):
            if group.number >= 0 and not group.sequence and not group.issued:
                group.entered = group.completed = 0  # it has a number, and no call has been recorded with it
            continue
        entered, completed = (_parse_int(counters.get(f"last_{what}_collective")) for what in ("enqueued", "completed"))
        if group.sequence or group.issued:
            group.uncertain |= group.backend == "gloo" and entered > group.operations >= 0
            if trace.only_active and len(group.transfers) == 1 and entered == completed >= 0:
                group.transfers = []  # the part of an ended batch, whose last entry is left out
            if group.sequence and group.backend != "gloo" and _recover_overwritten(group, completed):
                trace.pending_lost |= trace.only_active
            continue
        without_entries.append((group, max(entered, 0), max(completed, 0)))
    trace.pending_kept = trace.complete or all(
        _holds_pending(group, by_number.get(group.number)) for group in trace.groups
    )
    for group, entered, completed in without_entries:
        # No active entry means that all have ended, unless active entries may have been overwritten.
        ended = not trace.entries or (trace.only_active and not trace.pending_lost and not may_be_full)
        group.from_status, group.entered, group.completed = True, entered, entered if ended else completed
        if group.completed < group.entered:
            group.pending = PendingEntry()


def _holds_pending(group: CommunicatorTrace, counters: Any) -> bool:
    """Whether the counters of a communicator prove that all of its unfinished operations have an entry. They number
    its collectives, or its sends, receives and batches; where it has both, they prove nothing."""
    if not isinstance(counters, dict):
        return group.number >= 0 and not group.sequence and not group.issued
    entered, completed = (_parse_int(counters.get(f"last_{what}_collective")) for what in ("enqueued", "completed"))
    if group.sequence and group.issued:
        return False
    first = group.first if group.sequence else group.first_transfer
    return max(entered, 0) == max(completed, 0) or 0 <= first <= max(completed, 0) + 1


def _recover_overwritten(group: CommunicatorTrace, completed: int) -> bool:
    """Corrects a communicator whose oldest unfinished collective is older than the dump's entries, if it is one. If no
    entry of a dump has ended, only this shows that the dump is not one of all active entries."""
    is_overwritten = not group.issued and group.ended < 0 and 0 <= completed < group.first - 1
    if is_overwritten:
        group.completed, group.pending = completed, PendingEntry()
    return is_overwritten


def _number_groups(trace: RankTrace, numbers: Collection[int]) -> None:
    """Numbers the communicators without entries: those between two of known number, in the order of creation, if there
    are exactly as many as numbers between them. `numbers` are those that the dump has counters of."""
    named = [group for group in trace.groups if _is_number(group.name)]
    default = [group for group in trace.groups if "default_pg" in (group.name, group.description)]
    if len(default) == 1 and default[0].number < 0:
        default[0].number = 0
    if len({group.name for group in named}) < len(named):
        return
    named.sort(key=lambda group: int(group.name))
    known = [(at, group.number) for at, group in enumerate(named) if group.number >= 0]
    ascending = sorted({number for _, number in known})
    if not known or [number for _, number in known] != ascending:
        return
    for (low, first), (high, last) in pairwise([(-1, -1), *known]):
        if last - first == high - low:
            for at in range(low + 1, high):
                named[at].number = first + at - low
    newest, number = known[-1]
    if newest == number and all(each < len(named) for each in numbers):
        for at in range(newest + 1, len(named)):
            named[at].number = at


def _is_number(text: str) -> bool:
    """Whether a text may be the number of a communicator; a hostile one may be very long."""
    return text.isdecimal() and len(text) < 10


def _member_list(ranks: Any) -> str:
    """A list of ranks, or torch's text of such a list, as text; empty for any other value."""
    if isinstance(ranks, list) and all(type(rank) is int for rank in ranks):
        ranks = str(ranks)
    if not isinstance(ranks, str) or len(ranks) > _MAX_MEMBERS_CHARS:
        return ""
    return ranks if re.fullmatch(r"\[\s*\d{1,7}(\s*,\s*\d{1,7})*\s*\]", ranks) else ""


def _parse_int(value: Any) -> int:
    try:
        return int(value) if isinstance(value, int | str) else -1
    except ValueError:
        return -1
