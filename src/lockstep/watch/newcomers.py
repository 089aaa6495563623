"""Processes of a watched command that are ranks, or will be, and have no beacon yet: those who sleep, import or load
before they meet the others. Asked for only while others wait for them."""

from collections.abc import Collection, Mapping
from pathlib import Path

from lockstep.watch import procs
from lockstep.watch.launchers import rank_of

HELPERS = ("resource_tracker", "forkserver import main")
"""In the command lines of what Python's multiprocessing starts for itself."""


def newcomers(
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
    told = {rank: rank_of(environments.get(pid, {})) for rank, pid in there.items()}
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
    ranked = {pid: said for pid, variables in environments.items() if (said := rank_of(variables)) is not None}
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
    parents = {parent for pid in there if (parent := procs.parent(pid)) is not None}
    below = {pid for parent in parents for pid in procs.children(parent)}
    return sorted((pid for pid in below if pid in environments and pid not in known and _works(pid)), key=_age)


def _works(pid: int) -> bool:
    return is_python(pid) and not any(helper in _command(pid) for helper in HELPERS)


def _age(pid: int) -> tuple[int, int]:
    return procs.start_ticks(pid) or 0, pid


def is_python(pid: int) -> bool:
    """Whether it runs an interpreter; False when it is gone or somebody else's."""
    try:
        return Path(f"/proc/{pid}/exe").readlink().name.startswith("python")
    except OSError:
        return False


def _command(pid: int) -> str:
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
