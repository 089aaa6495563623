"""The trainer's state of the newest step, in shared memory outside its ranks."""

import logging
import shutil
from pathlib import Path

from lockstep.cluster.protocol import RemoteError
from lockstep.run.policy import Policy
from lockstep.train.copies import NoCopy, NoRoomForCopy, newest_copy

log = logging.getLogger(__name__)


class MemoryCopy:
    """Written after every commit; gone with the run's shared memory, unlike a checkpoint."""

    def __init__(self, policy: Policy, folder: Path) -> None:
        self.policy, self.folder = policy, folder
        self._full = False
        shutil.rmtree(folder, ignore_errors=True)  # what an earlier controller's ranks have left goes beyond our steps
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def write(self, version: int) -> None:
        """Has every rank copy its part. Where there is no room after all, that is said, and not tried again."""
        if self._full:
            return
        try:
            self.policy.copy_state(self.folder, version)
        except RemoteError as error:
            if error.code != NoRoomForCopy.error_code:
                raise
            log.warning("%s; after a fault, steps since the newest checkpoint will be trained again", error.message)
            self._full = True
            shutil.rmtree(self.folder, ignore_errors=True)

    def restore(self, at_least: int) -> int | None:
        """Loads the newest copy that all ranks have, unless it is older than that; which version it is of."""
        version = newest_copy(self.folder, self.policy.ranks)
        if version is None or version < at_least:
            return None
        try:
            self.policy.load_copy(self.folder, version)
        except RemoteError as error:
            if error.code != NoCopy.error_code:
                raise
            log.warning("%s; going on from the checkpoint", error.message)
            return None
        return version
