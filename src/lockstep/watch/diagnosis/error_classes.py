"""Failure classes (FAILURES.md): which one an exit code, exception or note proves, and which errors are only effects.

A class names the cause. A watchdog's timeout, a reset connection or a SIGABRT is never a cause by itself: it is
what the other ranks see.
"""

import re
import signal
from dataclasses import dataclass, replace

from lockstep.watch.diagnosis.evidence_types import NO_EXIT_CODE, Liveness, ProcessNote
from lockstep.watch.diagnosis.verdict import Alternative

_EFFECTS = re.compile(
    r"connection (?:was )?(?:reset|closed|aborted)|reset by peer|closed by (?:remote )?peer|broken pipe|socket closed"
    r"|ncclRemoteError|communicator (?:was|has been) aborted|CollectiveStalled|WorkerDied|ActorDiedError"
    r"|watchdog (?:caught|thread)|DistBackendError.*timeout|timed? ?out waiting|Timed out after|TimeoutError"
    r"|Detected mismatch between collectives|EnforceNotMet|op\.preamble"
    r"|Application timeout caused pair closure|KeyboardInterrupt|SystemExit|Store(?:Timeout|Error)|EngineDeadError",
    re.IGNORECASE,
)

_STALLED = re.compile(r"(?:\w+\.)*CollectiveStalled\b")
"""The exception that the observer raises on who is freed. Its text is the verdict, of somebody else's cause."""
_REFUSED = re.compile(r"(?:\w+\.)*CollectiveRefused\b")
"""What the later of two ranks gets that do not fit together, whichever of them is wrong."""

_ERROR_CLASSES: tuple[tuple[str, str], ...] = (
    (r"CUDA out of memory|OutOfMemoryError|CUDA error: out of memory|CUBLAS_STATUS_ALLOC_FAILED", "rank_oom"),
    (
        r"No space left on device.*?/dev/shm|/dev/shm.*?No space left on device|insufficient shared memory",
        "shm_too_small",
    ),
    (r"No space left on device|ENOSPC|Errno 28|Disk quota exceeded", "storage_fault"),
    (r"Read-only file system|Stale file handle|Input/output error|Errno 5\b", "storage_fault"),
    (r"MemoryError|Cannot allocate memory|std::bad_alloc|Errno 12\b", "host_oom"),
    (r"Address already in use|EADDRINUSE|Errno 98\b", "port_in_use"),
    (r"Too many open files|Errno 24\b|can't start new thread|Resource temporarily unavailable", "os_limits"),
    (r"device-side assert|illegal memory access|CUDA error: unspecified launch failure", "cuda_kernel_error"),
    (r"uncorrectable ECC|fallen off the bus|\bXid\b", "gpu_hardware_fault"),
    (r"\bibv_|vendor error|RDMA|GID index", "ib_rdma_fault"),
    (r"(?:loss|logits?|rewards?|gradients?|probability tensor).{0,40}\b(?:nan|inf)\b|FloatingPointError", "nan_or_inf"),
    (r"clients joined|rendezvous.*time|RendezvousTimeout|RendezvousConnectionError", "rendezvous_incomplete"),
    (r"Name or service not known|Temporary failure in name resolution|getaddrinfo", "master_unreachable"),
    (r"ReadTimeout|ConnectTimeout|HTTPStatusError|50[234] (?:Server Error|Bad Gateway)", "remote_service_timeout"),
    (r"Detected mismatch between collectives|op\.preamble", "rank_divergent_branch"),
    (r"ValidationError|ConfigError", "config_error"),
)
_PATTERNS = tuple((re.compile(pattern, re.IGNORECASE | re.DOTALL), cause) for pattern, cause in _ERROR_CLASSES)

_REPORTED_BY_OTHERS = ("", "rendezvous_incomplete", "rank_divergent_branch")
"""Classes whose message comes from whoever notices, guilty or not."""

_CRASH_SIGNALS = frozenset({signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGSYS, signal.SIGTRAP})
_TERMINATION_SIGNALS = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGXCPU, signal.SIGUSR2})


@dataclass(frozen=True, slots=True)
class FailureClass:
    """A class, what else it may be, and how sure the end of the process alone makes it a culprit."""

    name: str = "unknown"
    alternatives: tuple[Alternative, ...] = ()
    own: float = 0.9
    """0..1: how surely a process that ended so ended by itself and not by what happened to another."""


def is_secondary_error(error: str) -> bool:
    """Whether an exception only says that somebody else is gone or late."""
    if is_collective_stalled(error):
        return True
    return bool(error) and bool(_EFFECTS.search(error)) and class_of_error(error) in _REPORTED_BY_OTHERS


def is_collective_stalled(error: str) -> bool:
    """Whether an exception is the observer's own verdict, which it raised on who waited."""
    return bool(_STALLED.match(error))


def is_collective_refused(error: str) -> bool:
    """Whether an exception says that a call did not fit a peer's, so that it was refused."""
    return bool(_REFUSED.match(error))


def class_of_error(error: str) -> str:
    """The class that an exception's text proves, empty when it proves none."""
    return next((cause for pattern, cause in _PATTERNS if pattern.search(error)), "")


def class_of_exit(life: int, code: int, note: ProcessNote) -> FailureClass:
    """The class of a process that has ended."""
    if is_secondary_error(note.error):
        return FailureClass(
            "unknown" if is_collective_stalled(note.error) else class_of_error(note.error) or "unknown", own=0.3
        )
    if is_collective_refused(note.error):
        return FailureClass("rank_divergent_branch", own=0.5)
    if note.cause in ("", "external_kill") and NO_EXIT_CODE < code < 0:  # what is said beside it is the signal's name
        return replace(_class_of_code(code), name=note.cause or _class_of_code(code).name)
    if note.cause:
        return FailureClass(note.cause, own=0.95)
    if note.error:
        proven = class_of_error(note.error)
        return FailureClass(proven, own=0.95) if proven else FailureClass("rank_exception_masked", own=0.9)
    if life == Liveness.LEFT or code == 0:
        return FailureClass(
            "unknown", (Alternative("uneven_data", 0.5), Alternative("rank_divergent_branch", 0.3)), own=0.85
        )
    return _class_of_code(code)


def _class_of_code(code: int) -> FailureClass:
    number = -code if NO_EXIT_CODE < code < 0 else code - 128 if 128 < code < 128 + 65 else 0
    if number == signal.SIGKILL:
        return FailureClass("unknown", (Alternative("host_oom", 0.5), Alternative("external_kill", 0.4)), own=0.9)
    if number == signal.SIGBUS:
        return FailureClass("unknown", (Alternative("shm_too_small", 0.6),), own=0.9)
    if number in _CRASH_SIGNALS:
        return FailureClass("unknown", (Alternative("framework_bug", 0.3),), own=0.9)
    if number in _TERMINATION_SIGNALS:
        return FailureClass("external_kill", own=0.6)
    if number == signal.SIGABRT:
        return FailureClass(
            "unknown", (Alternative("rank_divergent_branch", 0.3), Alternative("framework_bug", 0.2)), own=0.5
        )
    if code == NO_EXIT_CODE:
        return FailureClass("unknown", (Alternative("host_oom", 0.3), Alternative("external_kill", 0.3)), own=0.7)
    return FailureClass("rank_exception_masked", (Alternative("unknown", 0.4),), own=0.6)


def describe_exit(life: int, code: int) -> str:
    """In words: `was killed by SIGKILL`."""
    if life == Liveness.LEFT or code == 0:
        return "has ended with exit code 0"
    if code == NO_EXIT_CODE:
        return "has died"
    if code > 0:
        return f"has ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


CLASS_FIXES: dict[str, str] = {
    "rank_oom": "Lower the micro-batch or the token budget of the rank, or free memory before the collective.",
    "host_oom": "Give the host or the container more memory, or start fewer loader workers.",
    "shm_too_small": "Give the container more shared memory (--shm-size, --ipc=host), or remove stale segments.",
    "storage_fault": "Free space or repair the file system, then resume.",
    "port_in_use": "End what holds the port, or choose another one.",
    "os_limits": "Raise the limit that the message names (ulimit -n, -u, pids of the cgroup).",
    "uneven_data": "Give every rank the same number of batches (drop the last, or pad with empty ones).",
    "rank_divergent_branch": "Make every rank take the same branch: data and rank must not decide whether a collective "
    "is entered.",
    "rendezvous_incomplete": "Look at the log of the rank that did not join: it never started, or cannot reach the "
    "store.",
    "remote_service_timeout": "Look at the service; give its calls a time-out and a retry.",
    "network_blocked": "Test the link between the hosts that the collective spans (firewall, cable, switch).",
    "external_kill": "Find out who sent the signal: a scheduler, a preemption, a shell.",
    "checkpoint_timeout": "Write checkpoints asynchronously or to a faster disk.",
}
"""What helps, by class."""
