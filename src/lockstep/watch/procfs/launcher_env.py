"""Reads rank, world size and local size from the environment variables that launchers set, and finds the processes of
a watched command that are ranks but have no beacon yet.
"""

import ipaddress
from collections.abc import Collection, Mapping
from pathlib import Path
from urllib.parse import urlparse

from lockstep.watch.procfs import processes

RANK_VARIABLE = "RANK"
"""Set by torchrun, accelerate and deepspeed, together with `LOCAL_RANK`. Alone it may be a node's number, as with
Kubeflow."""
SCHEDULER_RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "MV2_COMM_WORLD_RANK", "SLURM_PROCID")
"""Set by Open MPI, PMIx, MPICH and Intel MPI, MVAPICH2 and Slurm for the processes that they start, which may be
launchers."""
_WORLD_SIZE_VARIABLES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE", "SLURM_NTASKS")
_LOCAL_SIZE_VARIABLES = ("LOCAL_WORLD_SIZE", "LOCAL_SIZE")
"""`LOCAL_SIZE` is DeepSpeed's."""
_CERTAIN, _LIKELY, _POSSIBLE = 0, 1, 2


def launcher_rank(variables: Mapping[str, str]) -> tuple[int, int] | None:
    """The rank that the launcher assigned, and how uncertain it is (0: certain). None if there is no rank."""
    if RANK_VARIABLE in variables and variables[RANK_VARIABLE].isdecimal():
        return int(variables[RANK_VARIABLE]), _CERTAIN if "LOCAL_RANK" in variables else _LIKELY
    values = (variables.get(name, "") for name in SCHEDULER_RANK_VARIABLES)
    return next(((int(value), _POSSIBLE) for value in values if value.isdecimal()), None)


def certain_rank(variables: Mapping[str, str]) -> int | None:
    """The rank, if the process certainly is a rank and not a launcher; else None."""
    found = launcher_rank(variables)
    return found[0] if found is not None and found[1] == _CERTAIN else None


def launcher_world_size(variables: Mapping[str, str]) -> int | None:
    """The world size that the launcher set; None if it set none."""
    values = (variables.get(name, "") for name in _WORLD_SIZE_VARIABLES)
    return next((int(value) for value in values if value.isdecimal()), None)


def ranks_on_this_host(rank: int, world: int, url: str, variables: Mapping[str, str]) -> tuple[int, int]:
    """The first and the last of the ranks that are certainly on this host; there may be more.

    Args:
        url: the URL of the rendezvous; `env://` if the environment holds the address.
    """
    local = _read_number(variables, "LOCAL_RANK")
    size = next((each for name in _LOCAL_SIZE_VARIABLES if (each := _read_number(variables, name)) is not None), None)
    launched = _read_number(variables, "WORLD_SIZE")
    if _is_single_host(url, variables) or (size is not None and size == launched):
        return 0, world - 1
    if local is not None and size is not None and launched == world and _read_number(variables, RANK_VARIABLE) == rank:
        return rank - local, rank - local + size - 1
    return rank, rank


def _is_single_host(url: str, variables: Mapping[str, str]) -> bool:
    """Whether no process on another host can reach that URL."""
    parsed = urlparse(url)
    host = variables.get("MASTER_ADDR", "") if parsed.scheme == "env" else parsed.hostname or ""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _read_number(variables: Mapping[str, str], name: str) -> int | None:
    value = variables.get(name, "")
    return int(value) if value.isdecimal() else None


HELPER_COMMANDS = ("resource_tracker", "forkserver import main")
"""Parts of the command lines of helper processes that Python's multiprocessing starts."""


def find_unregistered_ranks(
    run: str, waiting: Mapping[int, int], missing: Collection[int], known: Collection[int]
) -> tuple[dict[int, int], list[int]]:
    """Finds ranks that have no beacon yet, because they have not reached the rendezvous. Returns their pids by rank; if
    these cannot be determined, the pids of candidates.

    The launcher's variables identify ranks, if they are right about the waiting ranks. Otherwise the siblings of the
    waiting ranks are assigned in the order of their start, if there are as many as missing ranks. This is the order in
    which `torch.multiprocessing.spawn` starts ranks.

    Args:
        waiting: pids of the waiting ranks, by rank.
        known: pids of all processes that are known already.
    """
    environments = _environments(run)
    launched = {rank: launcher_rank(environments.get(pid, {})) for rank, pid in waiting.items()}
    if all(launched[rank] is not None and launched[rank][0] == rank for rank in waiting):  # type: ignore[index]
        found = _find_by_environment(environments, missing, known)
        if found:
            return found, []
    siblings = _sibling_workers(environments, waiting.values(), known)
    if len(siblings) == len(missing):
        return dict(zip(sorted(missing), siblings, strict=True)), []
    return {}, siblings


def _find_by_environment(
    environments: Mapping[int, Mapping[str, str]], missing: Collection[int], known: Collection[int]
) -> dict[int, int]:
    launched = {pid: launcher_rank(variables) for pid, variables in environments.items()}
    ranked = {pid: rank for pid, rank in launched.items() if rank is not None}
    least = min((uncertainty for _, uncertainty in ranked.values()), default=0)
    found: dict[int, int] = {}
    for pid in sorted(ranked, key=_age):  # a rank is older than its children, Python younger than its wrapper scripts
        rank, uncertainty = ranked[pid]
        if (
            uncertainty == least
            and rank in missing
            and pid not in known
            and (rank not in found or not is_python(found[rank]))
        ):
            found[rank] = pid
    return found


def _sibling_workers(
    environments: Mapping[int, Mapping[str, str]], waiting: Collection[int], known: Collection[int]
) -> list[int]:
    parents = {parent for pid in waiting if (parent := processes.parent_pid(pid)) is not None}
    below = {pid for parent in parents for pid in processes.child_pids(parent)}
    return sorted((pid for pid in below if pid in environments and pid not in known and _is_worker(pid)), key=_age)


def _is_worker(pid: int) -> bool:
    return is_python(pid) and not any(helper in _command_line(pid) for helper in HELPER_COMMANDS)


def _age(pid: int) -> tuple[int, int]:
    return processes.start_ticks(pid) or 0, pid


def is_python(pid: int) -> bool:
    """Whether a process runs a Python interpreter; False if it has ended or belongs to another user."""
    try:
        return Path(f"/proc/{pid}/exe").readlink().name.startswith("python")
    except OSError:
        return False


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def _environments(run: str) -> dict[int, dict[str, str]]:
    """The initial environments of all processes of a watched run, by pid."""
    mark, found = f"LOCKSTEP_WATCH={run}".encode(), {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdecimal():
            continue
        try:
            words = (folder / "environ").read_bytes().split(b"\0")
        except OSError:  # gone, or another user's
            continue
        if mark in words:
            pairs = (word.decode(errors="replace").partition("=") for word in words)
            found[int(folder.name)] = {name: value for name, _, value in pairs}
    return found
