"""Settings with which a run that does not fit would fit, found by trying."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any, Literal

from lockstep.cluster.placement.bundles import ProcessRequest, processes_of
from lockstep.config.cluster import PLACED_ROLES, PlacementConfig, RolePlacement
from lockstep.config.roles import section_of_role

Sets = Literal["all"] | tuple[tuple[str, ...], ...]
"""A value of `placement.colocate`."""
Change = dict[str, Any]
"""Values of config fields by dotted path, None for those to leave out."""
FitCheck = Callable[[Sequence[ProcessRequest], PlacementConfig], bool]
LoadCheck = Callable[[Sequence[str]], bool]
"""Whether a run's config is valid with these overrides (`field=value`)."""
Search = Callable[[list[ProcessRequest], PlacementConfig, FitCheck], Iterator[Change]]
"""Finds changes of one kind with which the run would fit, the smallest first."""

MAX_SUGGESTIONS = 4
"""Largest number of suggestions."""


def suggest_placements(
    requests: Sequence[ProcessRequest],
    placement: PlacementConfig,
    fits: FitCheck,
    loads: LoadCheck = lambda overrides: True,
) -> list[str]:
    """Settings with each of which the run would fit and its config is valid; a single change if one is enough."""

    def first(look: Search) -> list[str]:
        changes = (each for each in look(list(requests), placement, fits) if loads(_overrides(each)))
        return [_format_change(each) for each in islice(changes, 1)]

    found: list[str] = []
    for look in (
        _suggest_colocation,
        _suggest_narrower_engines,
        partial(_suggest_fewer_processes, "policy"),
        partial(_suggest_fewer_processes, "critic"),
        partial(_suggest_fewer_processes, "rollout"),
        _suggest_any_nodes,
        _suggest_fewer_cores,
        _suggest_fewer_scorers,
    ):
        if len(found) == MAX_SUGGESTIONS:
            break
        found += first(look)
    return found or first(_suggest_halving)


def _overrides(change: Change) -> list[str]:
    """A change as overrides of a config."""
    return [f"{field}={'null' if value is None else _format_value(value)}" for field, value in change.items()]


def _format_change(change: Change) -> str:
    """Human-readable overrides, such as `trainer.ranks=4 with rollout.engine.count=1`."""
    values = [f"{field}={_format_value(value)}" for field, value in change.items() if value is not None]
    removed = [field for field, value in change.items() if value is None]
    parts = [" with ".join(filter(None, (values[0], " and ".join(values[1:]))))] if values else []
    return " ".join([*parts, *([f"without {' and '.join(removed)}"] if removed else [])])


def _format_value(value: Any) -> str:
    """The value as in an override; one set of roles needs no list around it."""
    if not isinstance(value, tuple):
        return f"{value:g}" if isinstance(value, float) else str(value)
    texts = [f"[{','.join(roles)}]" for roles in value]
    return texts[0] if len(texts) == 1 else f"[{','.join(texts)}]"


def _placed_roles(requests: Sequence[ProcessRequest]) -> list[tuple[str, ...]]:
    """Each role of the run that has a placement, and then all of them."""
    names = [name for name in PLACED_ROLES if processes_of(requests, name)]
    return [*((name,) for name in names), *([tuple(names)] if len(names) > 1 else [])]


def _keep_first(requests: Sequence[ProcessRequest], role: str, count: int) -> list[ProcessRequest]:
    """The first `count` processes of a role, and all other processes."""
    return [each for each in requests if each.role != role or each.rank < count]


def _suggest_colocation(requests: list[ProcessRequest], placement: PlacementConfig, fits: FitCheck) -> Iterator[Change]:
    ranks, engines = processes_of(requests, "policy"), processes_of(requests, "rollout")
    if placement.shared or not ranks or not engines or not ranks[0].gpus:
        return
    most = len(ranks) // engines[0].gpus
    fewer = [most] if 0 < most < len(engines) else []
    for count in (len(engines), *fewer):
        also = {"rollout.engine.count": count} if count < len(engines) else {}
        for sets in _sets_with_engines(placement):
            together = placement.model_copy(update={"colocate": sets})
            if fits(_keep_first(requests, "rollout", count), together):
                yield {"placement.colocate": sets, **also}


def _sets_with_engines(placement: PlacementConfig) -> list[Sets]:
    """Values of `colocate` with which engines share the policy's devices, and roles that share devices now still do:
    `all`, and the present sets with the engines in the policy's, which is first where there are any sets."""
    sets = () if placement.colocate == "all" else placement.colocate
    added = ((*placement.set_of("policy"), "rollout"), *(roles for roles in sets if "policy" not in roles))
    return [added, "all"] if sets else ["all", added]


def _suggest_narrower_engines(
    requests: list[ProcessRequest], placement: PlacementConfig, fits: FitCheck
) -> Iterator[Change]:
    engines = processes_of(requests, "rollout")
    width = engines[0].gpus if engines else 0
    for less in range(width - 1, 0, -1):
        if width % less == 0:
            narrow = [replace(each, gpus=less) if each.role == "rollout" else each for each in requests]
            if fits(narrow, placement):
                yield {"rollout.engine.tensor_parallel_size": less}


def _suggest_fewer_processes(
    role: str, requests: list[ProcessRequest], placement: PlacementConfig, fits: FitCheck
) -> Iterator[Change]:
    """Fewer processes of a role, and of the roles that share its devices: these have as many ranks. Fewer ranks leave
    room for fewer engines on their devices."""
    names = _ranks_of_set(role, requests, placement)
    if not names or names[0] != role:  # none, or those of the set are suggested for another role
        return
    engines = processes_of(requests, "rollout") if role == "policy" and placement.shared else []
    fields = {name: processes_of(requests, name)[0].counted_by for name in names}
    sections = {section_of_role(name): name for name in names}

    def less(count: int) -> tuple[list[ProcessRequest], PlacementConfig]:
        fewer = list(requests)
        for name in names:
            fewer = _keep_first(fewer, name, count)
        if engines:  # an engine uses its ranks' GPUs
            fewer = _keep_first(fewer, "rollout", min(len(engines), count // max(engines[0].gpus, 1)))
        nodes = {
            section: _on_fewer_nodes(getattr(placement, section), name, requests, count)
            for section, name in sections.items()
        }
        return fewer, placement.model_copy(update=nodes)

    for count in _largest_fitting(len(processes_of(requests, role)), lambda count: fits(*less(count))):
        fewer, on_nodes = less(count)
        change: Change = dict.fromkeys(fields.values(), count)
        kept = len(processes_of(fewer, "rollout"))
        if engines and not kept:
            return
        if engines and kept < len(engines):
            change["rollout.engine.count"] = kept
        for section in sections:
            nodes = getattr(on_nodes, section).nodes
            if nodes != getattr(placement, section).nodes:
                change[f"placement.{section}.nodes"] = nodes
        yield change


def _ranks_of_set(role: str, requests: Sequence[ProcessRequest], placement: PlacementConfig) -> list[str]:
    """The roles with ranks that share devices with a role, itself included, in the order of `PLACED_ROLES`. Engines are
    alone: there may be fewer of them than ranks."""
    present = dict.fromkeys(each.role for each in requests if each.section in PLACED_ROLES)
    if role == "rollout":
        return [role] if role in present else []
    key = placement.device_key(role)
    names = [name for name in present if name != "rollout" and placement.device_key(name) == key]
    return sorted(names, key=lambda name: PLACED_ROLES.index(section_of_role(name)))


def _on_fewer_nodes(role: RolePlacement, name: str, requests: Sequence[ProcessRequest], count: int) -> RolePlacement:
    """With the same number per node as before."""
    all_of = len(processes_of(requests, name))
    if role.nodes is None or all_of % role.nodes or count % (all_of // role.nodes):
        return role
    return role.model_copy(update={"nodes": count // (all_of // role.nodes)})


def _suggest_any_nodes(requests: list[ProcessRequest], placement: PlacementConfig, fits: FitCheck) -> Iterator[Change]:
    """Removes limits on the number of nodes."""
    for names in _placed_roles(requests):
        change, unlimited = _without_limits(placement, names)
        if change and fits(requests, unlimited):
            yield change


def _without_limits(placement: PlacementConfig, sections: Sequence[str]) -> tuple[Change, PlacementConfig]:
    """The fields of these sections that limit the number of nodes, to be left out, and the placement without them."""
    limits = [
        (section, field)
        for section in sections
        for field in ("nodes", "gpus_per_node")
        if getattr(getattr(placement, section), field) is not None
    ]
    for section, field in limits:
        role = getattr(placement, section).model_copy(update={field: None})
        placement = placement.model_copy(update={section: role})
    return {f"placement.{section}.{field}": None for section, field in limits}, placement


def _suggest_fewer_cores(
    requests: list[ProcessRequest], placement: PlacementConfig, fits: FitCheck
) -> Iterator[Change]:
    for share in (0.5, 0.25, 0.1):
        for roles in _placed_roles(requests):
            cpus = {name: getattr(placement, name).cpus * share for name in roles}
            least = [replace(e, cpus=e.cpus * share) if e.role in roles else e for e in requests]
            if fits(least, placement):
                yield {f"placement.{name}.cpus": round(value, 4) for name, value in cpus.items()}


def _suggest_fewer_scorers(
    requests: list[ProcessRequest], placement: PlacementConfig, fits: FitCheck
) -> Iterator[Change]:
    for role, field in (("reward", "reward.workers"), ("environment", "rollout.environment.workers")):

        def fewer(count: int, role: str = role) -> bool:
            return fits(_keep_first(requests, role, count), placement)

        for count in _largest_fitting(len(processes_of(requests, role)), fewer):
            yield {field: count}


def _suggest_halving(requests: list[ProcessRequest], placement: PlacementConfig, fits: FitCheck) -> Iterator[Change]:
    """Halves all counts and the engines' width repeatedly, without limits on the number of nodes."""
    names = [name for name in PLACED_ROLES if any(each.section == name for each in requests)]
    limits, placement = _without_limits(placement, names)
    fields = {each.role: each.counted_by for each in requests}
    initial = {role: len(processes_of(requests, role)) for role in fields}
    counts, width = dict(initial), max((each.gpus for each in requests if each.role == "rollout"), default=0)
    widest = width
    while width > 1 or any(count > 1 for count in counts.values()):
        counts, width = {role: max(count // 2, 1) for role, count in counts.items()}, max(width // 2, 1)
        less = [each for each in requests if each.rank < counts[each.role]]
        less = [replace(e, gpus=min(e.gpus, width)) if e.role == "rollout" else e for e in less]
        if fits(less, placement):
            changed: Change = {field: counts[role] for role, field in fields.items() if counts[role] < initial[role]}
            yield changed | ({"rollout.engine.tensor_parallel_size": width} if width < widest else {}) | limits


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
