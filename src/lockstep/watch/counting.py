"""Which of c10d's numbers belong to which communicator of this process."""

from collections.abc import Iterable
from typing import Any

from lockstep.watch.counts import Flight, flights
from lockstep.watch.member import UNSAID, Member


class Counting:
    """Gives members what c10d's flight recorders say; where they say nothing, its sequence number."""

    def __init__(self, c10d: Any) -> None:
        self.flights: list[Flight] = flights(c10d)
        self._flying: dict[tuple[str, str], Member | None] = {}
        """By flight recorder and its number of the communicator; None: it was destroyed."""

    def count(self, members: Iterable[Member]) -> None:
        """One look. `members` in the order in which they were made."""
        everybody, counted = list(members), set()
        for flight in self.flights:
            for number, numbers in flight.status().items():
                key = flight.kind, number
                member = self._flying[key] if key in self._flying else self._fly(flight, number, everybody)
                if member is not None:
                    member.count(numbers)
                    counted.add(id(member))
        for member in everybody:
            member.verify()
            if id(member) not in counted and member.sequence() > 0:
                member.count((member.sequence(), UNSAID))

    def _fly(self, flight: Flight, number: str, members: list[Member]) -> Member | None:
        """The newest communicator of that name that has no number yet."""
        name = flight.name(number)
        taken = {id(member) for member in self._flying.values()}
        free = [each for each in members if each.name == name and id(each) not in taken]
        if not free:
            return None
        self._flying[flight.kind, number] = free[-1]
        return free[-1]

    def forget(self, member: Member) -> None:
        """Its numbers stay its own: a later communicator of the same name has others."""
        self._flying = {key: None if kept is member else kept for key, kept in self._flying.items()}
