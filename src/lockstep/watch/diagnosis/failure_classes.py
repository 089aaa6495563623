"""Derives the failure class (FAILURES.md) of a process from its exit code, its exception, and what the agent found out.

A class names the cause. Errors that a process gets because another one failed first (a watchdog's timeout, a reset
connection) prove no class; `is_secondary_error` recognises them.
"""

import re
import signal
from dataclasses import dataclass, replace

from lockstep.watch.diagnosis.evidence_types import NO_EXIT_CODE, Liveness, ProcessNote
from lockstep.watch.diagnosis.verdict import Alternative

_SECONDARY_ERRORS = re.compile(
    r"connection (?:was )?(?:reset|closed|aborted)|reset by peer|closed by (?:remote )?peer|broken pipe|socket closed"
    r"|ncclRemoteError|communicator (?:was|has been) aborted|CollectiveStalled|WorkerDied|ActorDiedError"
    r"|watchdog (?:caught|thread)|DistBackendError.*timeout|timed? ?out waiting|Timed out after|TimeoutError"
    r"|Detected mismatch between collectives|EnforceNotMet|op\.preamble"
    r"|Application timeout caused pair closure|KeyboardInterrupt|SystemExit|Store(?:Timeout|Error)|EngineDeadError",
    re.IGNORECASE,
)

_STALLED = re.compile(r"(?:\w+\.)*CollectiveStalled\b")
"""The exception that is raised on ranks when the supervisor aborts the collective in which they wait. Its text is the
verdict on another process."""
_REFUSED = re.compile(r"(?:\w+\.)*CollectiveRefused\b")
"""The exception on the later of two ranks whose calls do not match; either of the two calls may be wrong."""


def _pattern(*alternatives: str) -> re.Pattern[str]:
    return re.compile("|".join(alternatives), re.IGNORECASE | re.DOTALL)


_ERROR_CLASSES: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("host_oom", _pattern(r"\bray\S*\.OutOfMemoryError", r"node running low on memory")),
    (
        "rank_oom",
        _pattern(
            r"CUDA out of memory", r"OutOfMemoryError", r"CUDA error: out of memory", r"CUBLAS_STATUS_ALLOC_FAILED"
        ),
    ),
    (
        "shm_too_small",
        _pattern(
            r"No space left on device.*?(?:/dev/shm|/psm_|/torch_\d)",
            r"(?:/dev/shm|/psm_|/torch_\d).*?(?:No space left on device|Resource temporarily unavailable)",
            r"insufficient shared memory",
        ),
    ),
    ("storage_fault", _pattern(r"No space left on device", r"ENOSPC", r"Errno 28", r"Disk quota exceeded")),
    (
        "storage_fault",
        _pattern(
            r"Read-only file system", r"Stale file handle", r"Input/output error", r"Errno 5\b",
            r"unable to lock file",
        ),
    ),
    (
        "host_oom",
        _pattern(
            r"MemoryError", r"Cannot allocate memory", r"std::bad_alloc", r"Errno 12\b",
            r"DefaultCPUAllocator: can't allocate memory",
        ),
    ),
    ("port_in_use", _pattern(r"Address already in use", r"EADDRINUSE", r"Errno 98\b")),
    (
        "os_limits",
        _pattern(
            r"Too many open files", r"Errno 24\b", r"can't start new thread", r"Resource temporarily unavailable"
        ),
    ),
    (
        "cuda_kernel_error",
        _pattern(r"device-side assert", r"illegal memory access", r"CUDA error: unspecified launch failure"),
    ),
    ("gpu_hardware_fault", _pattern(r"uncorrectable ECC", r"fallen off the bus", r"\bXid\b")),
    ("ib_rdma_fault", _pattern(r"\bibv_", r"vendor error", r"RDMA", r"GID index")),
    (
        "nan_or_inf",
        _pattern(
            r"(?:loss|logits?|rewards?|gradients?|probability tensor).{0,40}\b(?:nan|inf)\b", r"FloatingPointError"
        ),
    ),
    (
        "rendezvous_incomplete",
        _pattern(r"clients joined", r"rendezvous.*time", r"RendezvousTimeout", r"RendezvousConnectionError"),
    ),
    (
        "master_unreachable",
        _pattern(r"Name or service not known", r"Temporary failure in name resolution", r"getaddrinfo"),
    ),
    (
        "remote_service_timeout",
        _pattern(r"ReadTimeout", r"ConnectTimeout", r"HTTPStatusError", r"50[234] (?:Server Error|Bad Gateway)"),
    ),
    ("rank_divergent_branch", _pattern(r"Detected mismatch between collectives", r"op\.preamble")),
    ("config_error", _pattern(r"ValidationError", r"ConfigError")),
)  # fmt: skip
"""The text of an exception proves the first class whose pattern matches. The agent, the diagnosis and the recovery of
a run all use this table. The doctor's knowledge base also looks at the lines around an exception; a test checks that
it agrees with this table."""

_SEEN_BY_ANY_RANK = ("", "rendezvous_incomplete", "rank_divergent_branch")
"""Classes whose message may come from any rank, whichever one caused the failure; the empty text stands for an
exception that proves no class."""


@dataclass(frozen=True, slots=True)
class FailureClass:
    """The failure class of a process that has ended, and how likely the process itself caused the failure."""

    name: str = "unknown"
    alternatives: tuple[Alternative, ...] = ()
    end: str = "own_end"
    """What the exit alone says about whether this process caused the failure: a factor of `live_weights.yaml`."""


_CRASH = FailureClass(alternatives=(Alternative("framework_bug", 0.3),))
_ASKED_TO_END = FailureClass("external_kill", end="asked_to_end")
"""Less than a failure of its own: launchers end the others after the first."""
_CLASS_OF_SIGNAL: dict[int, FailureClass] = {
    signal.SIGKILL: FailureClass(alternatives=(Alternative("host_oom", 0.5), Alternative("external_kill", 0.4))),
    signal.SIGBUS: FailureClass(alternatives=(Alternative("shm_too_small", 0.6),)),
    signal.SIGABRT: FailureClass(
        alternatives=(Alternative("rank_divergent_branch", 0.3), Alternative("framework_bug", 0.2)), end="may_follow"
    ),
    **dict.fromkeys((signal.SIGSEGV, signal.SIGILL, signal.SIGFPE, signal.SIGSYS, signal.SIGTRAP), _CRASH),
    **dict.fromkeys((signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGXCPU, signal.SIGUSR2), _ASKED_TO_END),
}
_UNOBSERVED_END = FailureClass(
    alternatives=(Alternative("host_oom", 0.3), Alternative("external_kill", 0.3)), end="end_unobserved"
)
_ERROR_CODE = FailureClass("rank_exception_masked", (Alternative("unknown", 0.4),), end="error_code")


def is_secondary_error(error: str) -> bool:
    """Whether an exception only reports that another process has ended or is late."""
    if is_collective_stalled(error):
        return True
    return bool(error) and bool(_SECONDARY_ERRORS.search(error)) and class_of_error(error) in _SEEN_BY_ANY_RANK


def is_collective_stalled(error: str) -> bool:
    """Whether an exception is a `CollectiveStalled`, which carries the verdict on another process."""
    return bool(_STALLED.match(error))


def is_collective_refused(error: str) -> bool:
    """Whether an exception reports that a call was refused because it did not match a peer's call."""
    return bool(_REFUSED.match(error))


def class_of_error(error: str) -> str:
    """The class that the text of an exception proves; empty if it proves none."""
    return next((name for name, pattern in _ERROR_CLASSES if pattern.search(error)), "")


def class_of_own_error(error: str) -> str:
    """The class of the exception that ended a process. Returns `rank_exception_masked` (an exception of unknown class,
    which the errors of other ranks may hide) if another process may have caused the exception."""
    name = class_of_error(error)
    return "rank_exception_masked" if name in _SEEN_BY_ANY_RANK else name


def class_of_exit(liveness: int, code: int, note: ProcessNote) -> FailureClass:
    """The class of the failure of a process that has ended."""
    if is_secondary_error(note.error):
        name = "" if is_collective_stalled(note.error) else class_of_error(note.error)
        return FailureClass(name or "unknown", end="secondary")
    if is_collective_refused(note.error):
        return FailureClass("rank_divergent_branch", end="may_follow")
    if note.cause in ("", "external_kill") and NO_EXIT_CODE < code < 0:  # then `error` only names the signal
        return replace(_class_of_code(code), name=note.cause or _class_of_code(code).name)
    if note.cause:
        return FailureClass(note.cause, end="named_failure")
    if note.error:
        proven = class_of_error(note.error)
        return FailureClass(proven, end="named_failure") if proven else FailureClass("rank_exception_masked")
    if liveness == Liveness.EXITED or code == 0:
        causes = (Alternative("uneven_data", 0.5), Alternative("rank_divergent_branch", 0.3))
        return FailureClass("unknown", causes, "left_early")
    return _class_of_code(code)


def _class_of_code(code: int) -> FailureClass:
    number = -code if NO_EXIT_CODE < code < 0 else code - 128 if 128 < code < 128 + 65 else 0
    return _CLASS_OF_SIGNAL.get(number) or (_UNOBSERVED_END if code == NO_EXIT_CODE else _ERROR_CODE)


def describe_exit(liveness: int, code: int) -> str:
    """How a process ended, as a verb phrase: `was killed by SIGKILL`."""
    if liveness == Liveness.EXITED or code == 0:
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
    "port_in_use": "Stop the process that holds the port, or choose another port.",
    "os_limits": "Raise the limit that the message names (ulimit -n, -u, pids of the cgroup).",
    "uneven_data": "Give every rank the same number of batches (drop the last, or pad with empty ones).",
    "rank_divergent_branch": "Make every rank take the same branch: data and rank must not decide whether a collective "
    "is entered.",
    "rendezvous_incomplete": "Check the log of the rank that did not join: it never started, or cannot reach the "
    "store.",
    "remote_service_timeout": "Check the service; give its calls a timeout and a retry.",
    "network_blocked": "Test the link between the hosts that the collective spans (firewall, cable, switch).",
    "gpu_hardware_fault": "Take the GPU's host out of the job, reset the GPU (nvidia-smi -r -i N) or reboot, and run "
    "dcgmi diag -r 3.",
    "cuda_kernel_error": "Run again with CUDA_LAUNCH_BLOCKING=1: a kernel made an illegal access or failed an "
    "assertion.",
    "external_kill": "Find out who sent the signal: a scheduler, a preemption, a shell.",
    "checkpoint_timeout": "Write checkpoints asynchronously or to a faster disk.",
}
"""What users can do about a failure of each class."""
