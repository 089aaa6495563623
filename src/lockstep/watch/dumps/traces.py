"""What is read from a dump: a rank's calls on each of its communicators, as columns, and its unfinished operations.

Reader processes load this module, so it imports only the standard library.
"""

from array import array
from dataclasses import dataclass, field


@dataclass(slots=True)
class PendingEntry:
    """An operation that has not ended."""

    order: int = -1
    """Its position among all operations of the process; -1 if its entry has been overwritten."""
    since: float = float("nan")
    """When it was issued; NaN if unknown."""
    started: bool = False
    """True if the device has started it, as far as the recorder notes that."""
    parts: tuple[str, ...] = ()
    """The sends and receives in it: `recv 1<-0`, in ranks of the communicator."""


@dataclass(slots=True)
class CommunicatorTrace:
    """One rank's record of one communicator. Times are Unix seconds; unknown sequence numbers are -1."""

    name: str
    description: str = ""
    backend: str = ""
    members: str = ""
    """The ranks of the communicator as the dump lists them, `[0, 1]`; empty if the dump does not list them."""
    entered: int = -1
    """The last collective that this rank has entered."""
    completed: int = -1
    """This rank has completed this collective and, with gloo, all earlier ones."""
    entered_at: float = float("nan")
    completed_at: float = float("nan")
    ended: int = -1
    """The last collective that has ended on this rank, successfully or not; earlier ones may still run."""
    certain: int = -1
    """The last collective that this rank has certainly completed and that no rank can complete before all have entered
    it."""
    first: int = -1
    """The oldest collective in the dump."""
    needs_all: bool = False
    """True if no collective in the dump can be completed by a member before all have entered it."""
    pending: PendingEntry | None = None
    """The oldest collective that has not ended; None if all have."""
    transfers: list[PendingEntry] = field(default_factory=list)
    """Sends and receives that have not ended, oldest first; those of a batch are one entry."""
    first_transfer: int = -1
    """The lowest number (`p2p_seq_id`) of the sends, receives and batches in the dump."""
    issued: dict[str, int] = field(default_factory=dict)
    """The number of sends and receives in the dump, ended ones included, by text: `recv 1<-0`."""
    from_status: bool = False
    """True if the counters are those of `pg_status`, which in a communicator with sends and receives mean nothing."""
    uncertain: bool = False
    """True if the counters include calls without an entry (point-to-point with gloo)."""
    number: int = -1
    """The key of the communicator in `pg_status`."""
    operations: int = -1
    """The number of operations started, including sends and receives."""
    digested: int = -1
    """The number of the first block in `digests`; -1 if there is none."""
    digests: "array[int]" = field(default_factory=lambda: array("Q"))
    """Digests of the blocks of calls that are older than those in the columns below."""
    sequence: "array[int]" = field(default_factory=lambda: array("q"))
    signature: "array[int]" = field(default_factory=lambda: array("Q"))
    """Digests of calls; matching calls have equal signatures."""
    created: "array[int]" = field(default_factory=lambda: array("q"))
    """When the calls were made, in Unix nanoseconds."""
    site: "array[int]" = field(default_factory=lambda: array("i"))
    """Indices of the call sites in `RankTrace.sites`."""


@dataclass(slots=True)
class RankTrace:
    """The content of one rank's dump."""

    version: str = ""
    library: str = ""
    groups: list[CommunicatorTrace] = field(default_factory=list)
    entries: int = 0
    complete: bool = False
    """True if the dump holds every collective since the process started."""
    began: float = float("nan")
    """When the first collective was entered; NaN if its entry has been overwritten."""
    newest: float = float("nan")
    """When the newest entry was created."""
    world: int = 0
    """A lower bound of the number of ranks of the job."""
    sites: list[str] = field(default_factory=list)
    """Call sites: `train.py:31 in step`."""
    only_active: bool = False
    """True if completed entries are left out."""
    pending_lost: bool = False
    """True if unfinished operations may have been overwritten, so that the oldest one is unknown."""
    pending_kept: bool = False
    """True if the counters of the communicators prove that the dump holds all unfinished operations."""
    contiguous: bool = False
    """True if the dump holds every entry since its first, which is not the first of the process: older ones may have
    been overwritten."""
    timed: bool = False
    """True if the recorder notes when an operation starts on the device."""
    untimed: bool = False
    """True if it does not: an operation has ended without a start."""
    newest_ended: int = -1
    """The position of the newest operation that has ended, among all of the process; -1 if none is known."""
    timeout_s: float = float("nan")
    """The longest time-out of the operations that have not ended; NaN if unknown."""
    notes: list[str] = field(default_factory=list)
    """Problems with the dump, as text."""

    @property
    def unfinished(self) -> list[PendingEntry]:
        """Of each communicator, the oldest collective and all sends and receives that have not ended."""
        return [each for group in self.groups for each in (group.pending, *group.transfers) if each is not None]
