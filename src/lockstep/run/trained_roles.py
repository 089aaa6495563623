"""The trained models of a run, such as policy and critic, as one: their state is saved and restored together."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from lockstep.run.trainer_group import TrainerGroup


class TrainedRoles(Mapping[str, TrainerGroup]):
    """The ranks of every trained role, by role.

    A checkpoint of several roles is a folder with one part for each role, in a subfolder of its name. With one role,
    the folder is that role's checkpoint.
    """

    def __init__(self, groups: Sequence[TrainerGroup]) -> None:
        """Args:
        groups: the policy first.
        """
        self._groups = {group.role.name: group for group in groups}

    def __getitem__(self, role: str) -> TrainerGroup:
        return self._groups[role]

    def __iter__(self) -> Iterator[str]:
        return iter(self._groups)

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def policy(self) -> TrainerGroup:
        """The role whose weights are published and exported."""
        return next(iter(self._groups.values()))

    @property
    def others(self) -> list[TrainerGroup]:
        """All roles except the policy."""
        return list(self._groups.values())[1:]

    @property
    def parts(self) -> tuple[str, ...]:
        """The subfolders of a checkpoint; none if there is only one role."""
        return tuple(self._groups) if len(self._groups) > 1 else ()

    def part_folder(self, folder: Path, role: str) -> Path:
        """Where a role's part of the state in `folder` is."""
        return folder / role if self.parts else folder

    def save(self, folder: Path) -> None:
        """Begins to write a checkpoint of every role."""
        for name, group in self._groups.items():
            group.save(self.part_folder(folder, name))

    def saved(self) -> bool:
        """Whether the parts of the last save are complete on disk."""
        return all(group.saved() for group in self._groups.values())

    def load(self, folder: Path) -> None:
        """Loads a checkpoint into all roles."""
        for name, group in self._groups.items():
            group.load(self.part_folder(folder, name))

    def save_to_memory(self, folder: Path, version: int) -> None:
        """Copies the state of all roles into shared memory."""
        for name, group in self._groups.items():
            group.save_to_memory(self.part_folder(folder, name), version)

    def load_from_memory(self, folder: Path, version: int) -> None:
        """Loads a copy of all roles."""
        for name, group in self._groups.items():
            group.load_from_memory(self.part_folder(folder, name), version)

    def offload(self) -> None:
        """Frees the devices of the roles whose config says so."""
        for group in self._groups.values():
            group.offload()
