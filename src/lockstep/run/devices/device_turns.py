"""Roles that share devices (`placement.colocate`) take turns: before one of them computes, the others leave."""

from collections.abc import Callable, Iterable
from itertools import zip_longest
from typing import Protocol, TypeVar

from lockstep.config.run_config import RunConfig

T = TypeVar("T")


class DeviceUser(Protocol):
    """The processes of a role, which use devices."""

    def offload(self) -> None:
        """Leaves the devices once what was submitted before is done. Does nothing if that was done already."""


class DeviceTurns:
    """The users of the same devices. One at a time is on them."""

    def __init__(self) -> None:
        self._users: list[DeviceUser] = []

    @property
    def shared(self) -> bool:
        """Whether there are two users or more."""
        return len(self._users) > 1

    def join(self, user: DeviceUser) -> None:
        """Adds a user."""
        self._users.append(user)

    def begin(self, user: DeviceUser | None = None) -> None:
        """Makes all users leave the devices, except the one whose turn begins, if it is one that has joined. Returns
        when they have.

        Raises:
            RemoteError, WorkerDied, Stalled: a trained role, or engines with open requests, could not leave.
        """
        for each in self._users:
            if each is not user:
                each.offload()


class Engines(Protocol):
    """The engines of a run; implemented by `RolloutClient`."""

    def sleep(self) -> None:
        """Makes all engines leave their devices, and keeps lost ones from being replaced. Does nothing if the engines
        sleep already."""

    def wake(self) -> None:
        """Lets the engines use their devices again."""


class EngineTurn:
    """The engines of a run, whose turn begins when they generate or load weights.

    Args:
        turns: those of the engines' devices.
    """

    def __init__(self, turns: DeviceTurns, engines: Engines) -> None:
        self._turns, self._engines = turns, engines
        turns.join(self)

    def begin(self) -> None:
        """Makes trained and served roles leave the devices of the engines, which wake for their next request."""
        self._turns.begin(self)
        self._engines.wake()

    def offload(self) -> None:
        """Makes the engines sleep, once they have completed their requests. Raises what `RolloutClient.sleep`
        raises."""
        self._engines.sleep()


def turns_by_role(config: RunConfig) -> dict[str, DeviceTurns]:
    """The turns of each trained and served role, and of `rollout`: the same object for roles that share devices."""
    names = [*(role.name for role in config.train_roles), *(role.name for role in config.serve_roles), "rollout"]
    sets: dict[tuple[str, ...], DeviceTurns] = {}
    return {name: sets.setdefault(config.placement.device_key(name), DeviceTurns()) for name in names}


def divide_into_waves(roles: Iterable[T], turns: Callable[[T], DeviceTurns]) -> list[list[T]]:
    """Divides roles into waves. The roles of a wave share no devices, so they compute at the same time; those that
    share devices are in consecutive waves, in their order.

    Args:
        turns: the turns of a role.
    """
    sets: dict[int, list[T]] = {}
    for role in roles:
        sets.setdefault(id(turns(role)), []).append(role)
    return [[role for role in wave if role is not None] for wave in zip_longest(*sets.values())]
