"""Proposes the first exception as the cause, and says whose it is: the engine's, a setting's, or the rank's own."""

import re
from collections.abc import Iterator

from lockstep.doctor.judge.hypotheses import Candidate
from lockstep.doctor.judge.job_history import JobHistory
from lockstep.doctor.logs.line_origin import LineOrigin
from lockstep.doctor.logs.parsed_log import ParsedLog
from lockstep.doctor.logs.stack_traces import Traceback, is_primary
from lockstep.watch.diagnosis.verdict import Fact

_VLLM = re.compile(r"(?i)vllm|worker_?tp|enginecore|apiserver")
_VLLM_FILE = re.compile(r"(?:site|dist)-packages/vllm/|/vllm/(?:v1|engine|executor|worker|model_executor|entrypoints)/")
"""Files of vLLM itself, not of a trainer in a folder of that name."""
_FRONT = re.compile(r"/vllm/(?:entrypoints|renderers|inputs|transformers_utils|sampling_params)\b")
"""Files of vLLM that check what a user asks for."""
_REJECTING = re.compile(
    r"^(?:[\w.]+\.)?(?:ValueError|TypeError|RuntimeError|AssertionError|NotImplementedError|ImportError"
    r"|\w*(?:[Cc]onfig|Resolution|Template|Argument|Usage|Validation)\w*(?:Error|Exception))$"
)
"""Exceptions with which a library rejects what it was given."""
_SETTING_UP = re.compile(r"(?i)init|setup|set_up|config|parse|valid|check|resolve|create|build|_new_|_missing_")
_OF_SYSTEM = re.compile(
    r"CUDA|NCCL|cu[A-Z][a-z]|HIP|driver|out of memory|(?:shared|allocate) memory|[Cc]onnect|[Tt]imed? ?out|shm|[Ee]rrno"
    r"|in use|No space|\bfile\b|archive|denied|\b(?:died|killed|terminated|exited|crashed)\b"
)
"""Messages about a device, a connection, memory, files or the end of a process, which no setting explains."""


def exception_candidates(history: JobHistory) -> Iterator[Candidate]:
    """Yields a candidate for the first exception that neither ended a wait nor wraps another exception."""
    found = [(when if when is not None else float("inf"), log.source, traceback.number, origin, traceback, log)
             for origin, when, traceback, log in history.tracebacks if is_primary(traceback)]  # fmt: skip
    if not found:
        return
    _, _, _, raiser, traceback, log = min(found, key=lambda each: each[:3])
    fact = Fact(traceback.text, file=log.name, line=traceback.number)
    text = f"{f'Rank {raiser.rank}' if raiser.rank is not None else 'A process'} raised {traceback.type}"
    text += f" in {traceback.where}." if traceback.where else "."
    culprits = None if raiser.rank is None else (raiser.rank,)
    last = traceback.frames[-1] if traceback.frames else None
    refused = last is not None and last.source.startswith("raise ") and _FRONT.search(last.file)
    if _VLLM.search(raiser.role) or (last is not None and _VLLM_FILE.search(last.file) and not refused):
        yield Candidate("vllm_engine_failure", 0.5, [], culprits, "", text, [fact])
        return
    if _rejects_setting(history, raiser, traceback, log):
        yield Candidate("config_error", 0.65, [], (), "", text, [fact])
        return
    victims = bool(history.facts("peer_lost") or history.timeouts) and raiser.rank is not None
    yield Candidate("rank_exception_masked", 0.6 if victims else 0.45, [], culprits, "", text, [fact])


def _rejects_setting(history: JobHistory, raiser: LineOrigin, found: Traceback, log: ParsedLog) -> bool:
    """Whether a library raised the exception while it was set up, before the process made a step."""
    last = found.frames[-1] if found.frames else None
    if last is None or "-packages/" not in last.file or not _REJECTING.match(found.type):
        return False
    if _OF_SYSTEM.search(found.message) or not (last.source.startswith("raise ") or _SETTING_UP.search(last.function)):
        return False
    return not any(
        counter.line < found.number and not counter.bar and counter.origin.rank in (raiser.rank, None)
        for counter in history.counters_of(log.source)
    )
