"""Compares two configs of a run, and decides which differences would change the run's result."""

from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lockstep.base.text import count_noun
from lockstep.config.errors import ConfigError
from lockstep.config.loader import check_config
from lockstep.ledger import json_values
from lockstep.ledger.errors import ConfigChanged

ChangeEffect = Literal["none", "bits", "result"]

_NO_EFFECT = (
    "name",
    "folder",
    "folder_access",
    "checkpoint",
    "store",
    "report",
    "tracking",
    "cluster",
    "placement",
    "weights",
    "communication",
    "recovery",
    "watch",
    "early_stopping",
    "data.measure",
    "data.mixture.*.measure",
    "data.images.on_error",
    "data.images.workers",
    "data.mixture.*.images.on_error",
    "data.mixture.*.images.workers",
    "model.vision.store_gb",
    "filter_groups.at_limit",
    "evaluation.samples_shown",
    "reward.workers",
    "reward.timeout_s",
    "reward.memory_mb",
    "reward.terms.*.url",
    "reward.terms.*.base_url",
    "reward.terms.*.api_key_env",
    "reward.terms.*.timeout_s",
    "reward.terms.*.retries",
    "reward.terms.*.deadline_s",
    "reward.terms.*.concurrency",
    "trainer.collective_timeout_s",
    "trainer.profile",
    "trainer.offload",
    "trainer.malloc",
    "reference.ranks",
    "critic.export",
    "rollout.engine.malloc",
    "rollout.environment.workers",
    "rollout.environment.timeout_s",
    "rollout.environment.memory_mb",
)
"""Fields and sections that do not affect what a run computes: where it is stored, what it shows, which servers it uses,
how long it waits and when it fails. `*` stands for one part of a path."""
_CHANGES_BITS = (
    "trainer.ranks",
    "trainer.replicas",
    "trainer.rank_speeds",
    "trainer.threads",
    "trainer.reshard_after_forward",
    "trainer.activation_checkpointing",
    "trainer.head_chunk",
    "trainer.compile",
    "reference.threads",
    "rollout.reissue",
    "rollout.engine.count",
    "rollout.engine.threads",
    "rollout.engine.max_rows",
    "rollout.engine.cache_tokens",
    "rollout.engine.prefix_cache",
    "rollout.engine.tensor_parallel_size",
    "rollout.engine.max_num_seqs",
    "rollout.engine.gpu_memory_utilization",
    "rollout.engine.cpu_kv_cache_gb",
    "rollout.engine.enforce_eager",
    "rollout.engine.enable_prefix_caching",
)
"""Fields that divide the computation among processes and batches, and so change only the order of additions."""
_ROLE_SECTION = "trainer"
"""The section of a trained role whose fields are listed above; roles other than the policy have one in a section."""
_SCHEDULE_STEPS = "trainer.schedule.total_steps"
_CHANGES_RESULT = ("cluster.device",)
"""Exceptions from the lists above: with precision `auto`, a GPU computes in another precision than a CPU."""


class _Absent:
    """The value of a field that a config does not have."""

    def __repr__(self) -> str:
        return "(absent)"


ABSENT = _Absent()


@dataclass(frozen=True, slots=True)
class ConfigChange:
    path: str
    """The field as on the command line, such as `trainer.optimizer.lr`."""
    old: Any
    new: Any
    effect: ChangeEffect
    """The effect on the run's result: none, its last bits (about 1e-5 of the weights), or the result itself."""
    reason: str = ""
    """Why it has this effect, if that is not obvious."""

    @property
    def changes_result(self) -> bool:
        """Whether the change prevents a run from being resumed."""
        return self.effect == "result"

    @property
    def changes_bits(self) -> bool:
        """Whether a run can be resumed with the change, but will not end with the same bits."""
        return self.effect == "bits"

    def __str__(self) -> str:
        return f"{self.path}: {self.old!r} -> {self.new!r}{f' ({self.reason})' if self.reason else ''}"


def allowed_changes(
    folder: Path, old: Mapping[str, Any], new: Mapping[str, Any], accept: Collection[str], steps_done: int = 0
) -> tuple[ConfigChange, ...]:
    """Returns the changes from the run's config to `new`. Raises ConfigChanged if one of them would change the result
    of the steps that are done or to come, and is not in `accept`."""
    # `old` was read from JSON. The round trip makes equal values of `new` equal to it: tuples become lists.
    new = json_values.loads(json_values.dumps(dict(new), "config"))
    changes = tuple(compare_config(old, new, steps_done))
    refused = tuple(change for change in changes if change.changes_result and change.path not in accept)
    if refused:
        raise ConfigChanged(folder, refused)
    return changes


def compare_config(old: Mapping[str, Any], new: Mapping[str, Any], steps_done: int = 0) -> list[ConfigChange]:
    """Returns every field that differs between two resolved configs (`model_dump(mode="json")`), in their order. Fields
    that did not exist when the old config was written are compared by their defaults.

    Args:
        steps_done: Steps of the run with the old config, fewer than which it cannot have any more.
    """
    changes, old = [], _with_defaults(old)
    for path, before, after in config_differences("", old, new):
        if path == "steps":
            changes.append(_steps_change(old, new, steps_done))
        elif path.endswith(_SCHEDULE_STEPS):
            changes.append(_schedule_change(path, before, after, old, new))
        elif path.endswith("trainer.ranks") and _uses_dropout(_role_of(path, old)):
            section = path.removesuffix("trainer.ranks")
            why = f"which of an adapter's inputs are dropped ({section}model.adapter.lora_dropout) depends on the rank"
            changes.append(ConfigChange(path, before, after, "result", why))
        else:
            changes.append(ConfigChange(path, before, after, _effect_of(path)))
    return changes


def _with_defaults(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Adds the defaults of fields that did not exist when the config was written. Returns a config that is not valid
    any more unchanged."""
    try:
        return check_config(dict(config), "the run's config").model_dump(mode="json")
    except ConfigError:
        return config


def _effect_of(path: str) -> ChangeEffect:
    parts = path.split(".")

    def is_in(fields: tuple[str, ...]) -> bool:
        return any(_matches_field(parts, field.split(".")) for field in fields)

    if is_in(_CHANGES_RESULT) or not is_in(_NO_EFFECT + _CHANGES_BITS):
        return "result"
    return "bits" if is_in(_CHANGES_BITS) else "none"


def _matches_field(parts: list[str], field: list[str]) -> bool:
    if field[0] == _ROLE_SECTION and parts[1:2] == [_ROLE_SECTION]:
        parts = parts[1:]  # as in `critic.trainer.ranks`
    return len(parts) >= len(field) and all(known in ("*", part) for part, known in zip(parts, field, strict=False))


def _role_of(path: str, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The section with the model and trainer of the role that a field such as `critic.trainer.ranks` belongs to."""
    section, _, rest = path.partition(".")
    return config if not rest or section == _ROLE_SECTION else config.get(section) or {}


def _trained_sections(config: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """The sections with a trainer, each with the prefix of its fields: the policy's, which is the whole config, and
    those of other trained roles."""
    sections = [("", config), *((f"{name}.", value) for name, value in config.items() if isinstance(value, Mapping))]
    return [(prefix, values) for prefix, values in sections if isinstance(values.get(_ROLE_SECTION), Mapping)]


def _uses_dropout(config: Mapping[str, Any]) -> bool:
    return bool(((config.get("model") or {}).get("adapter") or {}).get("lora_dropout"))


def _steps_change(old: Mapping[str, Any], new: Mapping[str, Any], steps_done: int) -> ConfigChange:
    """Returns the effect of another number of steps. A run can be made longer, or shorter down to the steps done,
    unless the learning rate's schedule depends on that number."""
    before, after = old.get("steps", ABSENT), new.get("steps", ABSENT)
    if not (isinstance(before, int) and isinstance(after, int)):
        return ConfigChange("steps", before, after, "result")
    if after < steps_done:
        why = f"it has done {count_noun(steps_done, 'step')}; a new run can begin after fewer: --from RUN@{after}"
        return ConfigChange("steps", before, after, "result", why)
    was, becomes = _schedule_ends(old), _schedule_ends(new)
    for section, role in _trained_sections(new):
        schedule = role[_ROLE_SECTION].get("schedule") or {}
        end = becomes.get(section)
        if (end is None or end != was.get(section)) and schedule.get("total_steps") is None:
            end = was.get(section)
            remedy = f"set {section}{_SCHEDULE_STEPS}" + ("" if end is None else f"={end} to keep it as it is")
            why = f"the {schedule['kind']} schedule spans the run: {remedy}, or start another run (--from)"
            return ConfigChange("steps", before, after, "result", why)
    return ConfigChange("steps", before, after, "none")


def _schedule_change(
    path: str, before: Any, after: Any, old: Mapping[str, Any], new: Mapping[str, Any]
) -> ConfigChange:
    """Returns the effect of another `total_steps`: none if the schedule ends where it did because the run had as many
    steps, or if the learning rate stays the same anyway."""
    section = path.removesuffix(_SCHEDULE_STEPS)
    was, becomes = _schedule_ends(old), _schedule_ends(new)
    same = was.get(section) is not None and was.get(section) == becomes.get(section)
    return ConfigChange(path, before, after, "none" if same else "result")


def _schedule_ends(config: Mapping[str, Any]) -> Mapping[str, int | str | None]:
    """The optimizer step at which the learning rate's schedule of each trained section ends: "never" for a constant
    one, None if that depends on the run's length, which a config that is not valid any more does not tell."""
    lengths: dict[str, int] = {}
    with suppress(ConfigError):
        roles = check_config(dict(config), "the run's config").train_roles
        lengths = {f"{role.section}." if role.section else "": role.optimizer_steps for role in roles}
    ends: dict[str, int | str | None] = {}
    for section, role in _trained_sections(config):
        schedule = role[_ROLE_SECTION].get("schedule") or {}
        length = schedule.get("total_steps") or lengths.get(section)
        ends[section] = "never" if schedule.get("kind", "constant") == "constant" else length
    return ends


def config_differences(path: str, old: Any, new: Any) -> list[tuple[str, Any, Any]]:
    """The values that differ between two nested configs, as (dotted path below `path`, old, new); ABSENT for a missing
    one."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        keys = [*old, *(key for key in new if key not in old)]
        prefix = f"{path}." if path else ""
        pairs = ((f"{prefix}{key}", old.get(key, ABSENT), new.get(key, ABSENT)) for key in keys)
        return [change for inner, before, after in pairs for change in config_differences(inner, before, after)]
    if isinstance(old, list | tuple) and isinstance(new, list | tuple) and len(old) == len(new):
        triples = (
            (f"{path}.{index}", before, after) for index, (before, after) in enumerate(zip(old, new, strict=True))
        )
        return [change for inner, before, after in triples for change in config_differences(inner, before, after)]
    same = type(old) is type(new) or {type(old), type(new)} == {int, float} or {type(old), type(new)} == {list, tuple}
    return [] if same and old == new else [(path, old, new)]
