"""What launchers tell their processes through the environment: rank, world size, local size.

It also finds processes of a watched command that are ranks without a beacon yet: those that sleep, import or load
before the rendezvous. They are looked for only while other ranks wait for them.
"""

import ipaddress
from collections.abc import Collection, Mapping
from pathlib import Path
from urllib.parse import urlparse

from lockstep.watch.procfs import processes

RANK_VARIABLE = "RANK"
"""Set by torchrun, accelerate and deepspeed, with `LOCAL_RANK`. Alone it may be the number of a node, as Kubeflow has
it."""
SCHEDULER_RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "MV2_COMM_WORLD_RANK", "SLURM_PROCID")
"""Set by Open MPI, PMIx, MPICH and Intel MPI, MVAPICH2, Slurm: for what they start, which may be a launcher itself."""
_WORLD_SIZE_VARIABLES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE", "SLURM_NTASKS")
_LOCAL_SIZE_VARIABLES = ("LOCAL_WORLD_SIZE", "LOCAL_SIZE")
"""The second is DeepSpeed's."""
_SURE, _LIKELY, _POSSIBLE = 0, 1, 2


def launcher_rank(variables: Mapping[str, str]) -> tuple[int, int] | None:
    """The rank that the launcher gave, and how little that is to be trusted: 0 for sure. None where it says nothing."""
    if RANK_VARIABLE in variables and variables[RANK_VARIABLE].isdecimal():
        return int(variables[RANK_VARIABLE]), _SURE if "LOCAL_RANK" in variables else _LIKELY
    values = (variables.get(name, "") for name in SCHEDULER_RANK_VARIABLES)
    return next(((int(value), _POSSIBLE) for value in values if value.isdecimal()), None)


def certain_rank(variables: Mapping[str, str]) -> int | None:
    """The rank, where the process is one and no launcher."""
    found = launcher_rank(variables)
    return found[0] if found is not None and found[1] == _SURE else None


def launcher_world_size(variables: Mapping[str, str]) -> int | None:
    """How many ranks there are, as the launcher says."""
    values = (variables.get(name, "") for name in _WORLD_SIZE_VARIABLES)
    return next((int(value) for value in values if value.isdecimal()), None)


def ranks_on_this_host(rank: int, world: int, place: str, variables: Mapping[str, str]) -> tuple[int, int]:
    """First and last of the ranks that are on this host for sure; more may be.

    Args:
        place: the URL where the ranks meet, `env://` where the environment says it.
    """
    local = _read_number(variables, "LOCAL_RANK")
    size = next((each for name in _LOCAL_SIZE_VARIABLES if (each := _read_number(variables, name)) is not None), None)
    told = _read_number(variables, "WORLD_SIZE")
    if _is_single_host(place, variables) or (size is not None and size == told):
        return 0, world - 1
    if local is not None and size is not None and told == world and _read_number(variables, RANK_VARIABLE) == rank:
        return rank - local, rank - local + size - 1
    return rank, rank


def _is_single_host(place: str, variables: Mapping[str, str]) -> bool:
    """Whether nobody on another host can come to that place."""
    url = urlparse(place)
    host = variables.get("MASTER_ADDR", "") if url.scheme == "env" else url.hostname or ""
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
"""In the command lines of what Python's multiprocessing starts for itself."""


def find_unregistered_ranks(
    run: str, there: Mapping[int, int], missing: Collection[int], known: Collection[int]
) -> tuple[dict[int, int], list[int]]:
    """Pids, by rank, of those who are missing at a meeting, and pids of those who may be it, whichever of them.

    The launcher's environment says who is which rank, where it is right about those who are there. Of the others the
    siblings of those who are there are taken, in the order of their start, if they are as many as are missing: so does
    `torch.multiprocessing.spawn`, and where only one is missing the order does not matter.

    Args:
        there: pids of those who wait, by rank.
        known: pids of everybody who is known already.
    """
    environments = _environments(run)
    told = {rank: launcher_rank(environments.get(pid, {})) for rank, pid in there.items()}
    if all(told[rank] is not None and told[rank][0] == rank for rank in there):  # type: ignore[index]
        found = _by_environment(environments, missing, known)
        if found:
            return found, []
    siblings = _siblings(environments, there.values(), known)
    if len(siblings) == len(missing):
        return dict(zip(sorted(missing), siblings, strict=True)), []
    return {}, siblings


def _by_environment(
    environments: Mapping[int, Mapping[str, str]], missing: Collection[int], known: Collection[int]
) -> dict[int, int]:
    ranked = {pid: said for pid, variables in environments.items() if (said := launcher_rank(variables)) is not None}
    surest = min((trust for _, trust in ranked.values()), default=0)
    found: dict[int, int] = {}
    for pid in sorted(ranked, key=_age):  # a rank is older than what it starts, and Python younger than its wrappers
        rank, trust = ranked[pid]
        if (
            trust == surest
            and rank in missing
            and pid not in known
            and (rank not in found or not is_python(found[rank]))
        ):
            found[rank] = pid
    return found


def _siblings(
    environments: Mapping[int, Mapping[str, str]], there: Collection[int], known: Collection[int]
) -> list[int]:
    parents = {parent for pid in there if (parent := processes.parent_pid(pid)) is not None}
    below = {pid for parent in parents for pid in processes.child_pids(parent)}
    return sorted((pid for pid in below if pid in environments and pid not in known and _is_worker(pid)), key=_age)


def _is_worker(pid: int) -> bool:
    return is_python(pid) and not any(helper in _command_line(pid) for helper in HELPER_COMMANDS)


def _age(pid: int) -> tuple[int, int]:
    return processes.start_ticks(pid) or 0, pid


def is_python(pid: int) -> bool:
    """Whether it runs an interpreter; False when it is gone or somebody else's."""
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
    """The environments of all processes of a watched run, as they were when they started."""
    mark, found = f"LOCKSTEP_WATCH={run}".encode(), {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdecimal():
            continue
        try:
            words = (folder / "environ").read_bytes().split(b"\0")
        except OSError:  # gone, or somebody else's
            continue
        if mark in words:
            pairs = (word.decode(errors="replace").partition("=") for word in words)
            found[int(folder.name)] = {name: value for name, _, value in pairs}
    return found
