"""What launchers tell the processes that they start: rank, how many there are, how many of them on this host."""

import ipaddress
from collections.abc import Mapping
from urllib.parse import urlparse

ELASTIC = "RANK"
"""Set by torchrun, accelerate and deepspeed, with `LOCAL_RANK`. Alone it may be the number of a node, as Kubeflow has
it."""
PLAIN = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "MV2_COMM_WORLD_RANK", "SLURM_PROCID")
"""Set by Open MPI, PMIx, MPICH and Intel MPI, MVAPICH2, Slurm: for what they start, which may be a launcher itself."""
_SIZES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE", "SLURM_NTASKS")
_LOCAL_SIZES = ("LOCAL_WORLD_SIZE", "LOCAL_SIZE")
"""The second is DeepSpeed's."""
_SURE, _LIKELY, _POSSIBLE = 0, 1, 2


def rank_of(variables: Mapping[str, str]) -> tuple[int, int] | None:
    """The rank that the launcher gave, and how little that is to be trusted: 0 for sure. None where it says nothing."""
    if ELASTIC in variables and variables[ELASTIC].isdecimal():
        return int(variables[ELASTIC]), _SURE if "LOCAL_RANK" in variables else _LIKELY
    values = (variables.get(name, "") for name in PLAIN)
    return next(((int(value), _POSSIBLE) for value in values if value.isdecimal()), None)


def sure_rank(variables: Mapping[str, str]) -> int | None:
    """The rank, where the process is one and no launcher."""
    found = rank_of(variables)
    return found[0] if found is not None and found[1] == _SURE else None


def world_of(variables: Mapping[str, str]) -> int | None:
    """How many ranks there are, as the launcher says."""
    values = (variables.get(name, "") for name in _SIZES)
    return next((int(value) for value in values if value.isdecimal()), None)


def on_this_host(rank: int, world: int, place: str, variables: Mapping[str, str]) -> tuple[int, int]:
    """First and last of the ranks that are on this host for sure; more may be.

    Args:
        place: the URL where the ranks meet, `env://` where the environment says it.
    """
    local = _number(variables, "LOCAL_RANK")
    size = next((each for name in _LOCAL_SIZES if (each := _number(variables, name)) is not None), None)
    told = _number(variables, "WORLD_SIZE")
    if _only_here(place, variables) or (size is not None and size == told):
        return 0, world - 1
    if local is not None and size is not None and told == world and _number(variables, ELASTIC) == rank:
        return rank - local, rank - local + size - 1
    return rank, rank


def _only_here(place: str, variables: Mapping[str, str]) -> bool:
    """Whether nobody on another host can come to that place."""
    url = urlparse(place)
    host = variables.get("MASTER_ADDR", "") if url.scheme == "env" else url.hostname or ""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _number(variables: Mapping[str, str], name: str) -> int | None:
    value = variables.get(name, "")
    return int(value) if value.isdecimal() else None
