"""Settings with which a run that does not fit would fit, found by trying."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal

from lockstep.cluster.placement.bundles import COUNT_FIELD, ProcessRequest, processes_of
from lockstep.config.cluster import PLACED_ROLES, PlacementConfig, RolePlacement

Sets = Literal["all"] | tuple[tuple[str, ...], ...]
"""A value of `placement.colocate`."""
FitCheck = Callable[[Sequence[ProcessRequest], PlacementConfig], bool]

MAX_SUGGESTIONS = 4
"""Largest number of suggestions."""


def suggest_placements(requests: Sequence[ProcessRequest], placement: PlacementConfig, fits: FitCheck) -> list[str]:
    """Settings with each of which the run would fit; a single change if one is enough."""
    found: list[str] = []
    for look in (
        _suggest_colocation,
        _suggest_narrower_engines,
        _suggest_fewer_ranks,
        partial(_suggest_fewer_processes, "critic"),
        partial(_suggest_fewer_processes, "rollout"),
        _suggest_any_nodes,
        _suggest_fewer_cores,
        _suggest_fewer_scorers,
    ):
        if len(found) == MAX_SUGGESTIONS:
            break
        answer = next(look(list(requests), placement, fits), None)
        if answer is not None:
            found.append(answer)
    if not found:
        found += _suggest_halving(list(requests), placement, fits)
    return found


def _placed_roles(requests: Sequence[ProcessRequest]) -> list[tuple[str, ...]]:
    """Each role of the run that has a placement, and then all of them."""
    names = [name for name in PLACED_ROLES if processes_of(requests, name)]
    return [*((name,) for name in names), *([tuple(names)] if len(names) > 1 else [])]


def _keep_first(requests: Sequence[ProcessRequest], role: str, count: int) -> list[ProcessRequest]:
    """The first `count` processes of a role, and all other processes."""
    return [each for each in requests if each.role != role or each.rank < count]


def _suggest_colocation(requests: list[ProcessRequest], placement: PlacementConfig, fits: FitCheck) -> Iterator[str]:
    ranks, engines = processes_of(requests, "policy"), processes_of(requests, "rollout")
    if placement.shared or not ranks or not engines or not ranks[0].gpus:
        return
    most = len(ranks) // engines[0].gpus
    fewer = [most] if 0 < most < len(engines) else []
    for count in (len(engines), *fewer):
        also = f" with rollout.engine.count={count}" if count < len(engines) else ""
        for sets in _sets_with_engines(placement):
            together = placement.model_copy(update={"colocate": sets})
            if fits(_keep_first(requests, "rollout", count), together):
                yield f"placement.colocate={_format_sets(sets)}{also}"


def _sets_with_engines(placement: PlacementConfig) -> list[Sets]:
    """Values of `colocate` with which engines share the policy's devices, and roles that share devices now still do:
    `all`, and the present sets with the engines in the policy's, which is first where there are any sets."""
    sets = () if placement.colocate == "all" else placement.colocate
    added = ((*placement.set_of("policy"), "rollout"), *(roles for roles in sets if "policy" not in roles))
    return [added, "all"] if sets else ["all", added]


def _format_sets(sets: Sets) -> str:
    """The value as in an override; one set needs no list around it."""
    if isinstance(sets, str):
        return sets
    texts = [f"[{','.join(roles)}]" for roles in sets]
    return texts[0] if len(texts) == 1 else f"[{','.join(texts)}]"


def _suggest_narrower_engines(
    requests: list[ProcessRequest], placement: PlacementConfig, fits: FitCheck
) -> Iterator[str]:
    engines = processes_of(requests, "rollout")
    width = engines[0].gpus if engines else 0
    for less in range(width - 1, 0, -1):
        if width % less == 0:
            narrow = [replace(each, gpus=less) if each.role == "rollout" else each for each in requests]
            if fits(narrow, placement):
                yield f"rollout.engine.tensor_parallel_size={less}"


def _suggest_fewer_ranks(requests: list[ProcessRequest], placement: PlacementConfig, fits: FitCheck) -> Iterator[str]:
    engines = processes_of(requests, "rollout")

    def less(count: int) -> tuple[list[ProcessRequest], PlacementConfig]:
        fewer = _keep_first(requests, "policy", count)
        if placement.shared and engines:  # an engine uses its ranks' GPUs
            fewer = _keep_first(fewer, "rollout", min(len(engines), count // max(engines[0].gpus, 1)))
        return fewer, placement.model_copy(
            update={"policy": _on_fewer_nodes(placement.policy, "policy", requests, count)}
        )

    for count in _largest_fitting(len(processes_of(requests, "policy")), lambda count: fits(*less(count))):
        kept = len(processes_of(less(count)[0], "rollout"))
        if engines and not kept:
            return
        nodes = less(count)[1].policy.nodes
        also = [f"rollout.engine.count={kept}"] if kept < len(engines) else []
        also += [f"placement.policy.nodes={nodes}"] if nodes != placement.policy.nodes else []
        yield f"trainer.ranks={count}" + (f" with {' and '.join(also)}" if also else "")


def _suggest_fewer_processes(
    role: str, requests: list[ProcessRequest], placement: PlacementConfig, fits: FitCheck
) -> Iterator[str]:
    """Fewer processes of a role that shares its GPUs with no other."""

    def less(count: int) -> tuple[list[ProcessRequest], PlacementConfig]:
        fewer = _on_fewer_nodes(getattr(placement, role), role, requests, count)
        return _keep_first(requests, role, count), placement.model_copy(update={role: fewer})

    for count in _largest_fitting(len(processes_of(requests, role)), lambda count: fits(*less(count))):
        nodes = getattr(less(count)[1], role).nodes
        also = f" with placement.{role}.nodes={nodes}" if nodes != getattr(placement, role).nodes else ""
        yield f"{COUNT_FIELD[role]}={count}{also}"


def _on_fewer_nodes(role: RolePlacement, name: str, requests: Sequence[ProcessRequest], count: int) -> RolePlacement:
    """With the same number per node as before."""
    all_of = len(processes_of(requests, name))
    if role.nodes is None or all_of % role.nodes or count % (all_of // role.nodes):
        return role
    return role.model_copy(update={"nodes": count // (all_of // role.nodes)})


def _suggest_any_nodes(requests: list[ProcessRequest], placement: PlacementConfig, fits: FitCheck) -> Iterator[str]:
    """Removes limits on the number of nodes."""
    for names in _placed_roles(requests):
        roles = {name: getattr(placement, name) for name in names}
        fields = [
            f"placement.{name}.{field}"
            for name, role in roles.items()
            for field in ("nodes", "gpus_per_node")
            if getattr(role, field) is not None
        ]
        if not fields:
            continue
        open_ = {name: role.model_copy(update={"nodes": None, "gpus_per_node": None}) for name, role in roles.items()}
        if fits(requests, placement.model_copy(update=open_)):
            yield f"without {' and '.join(fields)}"


def _suggest_fewer_cores(requests: list[ProcessRequest], placement: PlacementConfig, fits: FitCheck) -> Iterator[str]:
    for share in (0.5, 0.25, 0.1):
        for roles in _placed_roles(requests):
            cpus = {name: getattr(placement, name).cpus * share for name in roles}
            least = [replace(e, cpus=e.cpus * share) if e.role in roles else e for e in requests]
            if fits(least, placement):
                yield " ".join(f"placement.{name}.cpus={round(value, 4):g}" for name, value in cpus.items())


def _suggest_fewer_scorers(requests: list[ProcessRequest], placement: PlacementConfig, fits: FitCheck) -> Iterator[str]:
    for role, field in (("reward", "reward.workers"), ("environment", "rollout.environment.workers")):

        def fewer(count: int, role: str = role) -> bool:
            return fits(_keep_first(requests, role, count), placement)

        for count in _largest_fitting(len(processes_of(requests, role)), fewer):
            yield f"{field}={count}"


def _suggest_halving(requests: list[ProcessRequest], placement: PlacementConfig, fits: FitCheck) -> Iterator[str]:
    """Halves all counts and the engines' width repeatedly, without limits on the number of nodes."""
    any_number = {"nodes": None, "gpus_per_node": None}
    open_ = {name: getattr(placement, name).model_copy(update=any_number) for name in PLACED_ROLES}
    limited = any(role != getattr(placement, name) for name, role in open_.items())
    placement = placement.model_copy(update=open_)
    fields = {each.role: each.counted_by for each in requests}
    initial = {role: len(processes_of(requests, role)) for role in fields}
    counts, width = dict(initial), max((each.gpus for each in requests if each.role == "rollout"), default=0)
    widest = width
    while width > 1 or any(count > 1 for count in counts.values()):
        counts, width = {role: max(count // 2, 1) for role, count in counts.items()}, max(width // 2, 1)
        less = [each for each in requests if each.rank < counts[each.role]]
        less = [replace(e, gpus=min(e.gpus, width)) if e.role == "rollout" else e for e in less]
        if fits(less, placement):
            changed = [f"{field}={counts[role]}" for role, field in fields.items() if counts[role] < initial[role]]
            changed += [f"rollout.engine.tensor_parallel_size={width}"] if width < widest else []
            yield " with ".join(changed) + (" without nodes and gpus_per_node of the placement" if limited else "")
            return


def _largest_fitting(have: int, fits: Callable[[int], bool]) -> Iterator[int]:
    """The largest number below `have` that fits: all small numbers are tried; of large ones, those that repeated
    halving reaches and the round numbers near them."""
    if have <= 64:
        tried: Sequence[int] = range(have - 1, 0, -1)
    else:
        low, high = 0, have
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        powers = [2**n for n in range(have.bit_length()) if 2**n < have]
        tried = sorted({n for n in (low, low // 8 * 8, *powers) if 0 < n < have}, reverse=True)
    yield from (count for count in tried if fits(count))
