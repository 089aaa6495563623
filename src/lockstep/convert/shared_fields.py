"""Fields that options of all frameworks lead to: names, steps, schedules, rows, adapters, reward terms."""

import math
import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from lockstep.base.secrets import is_secret_name, secret_kind, secret_values
from lockstep.config.cluster import RESERVED_VARIABLES, RayClusterConfig, matching_reason
from lockstep.convert.conversion import Conversion

PLACEHOLDER_STEPS = 1000
"""Written where the number of steps cannot be derived."""
_SCHEDULES: Mapping[str, tuple[str, float | None]] = {
    "constant": ("constant", None),
    "constant_with_warmup": ("constant", None),
    "linear": ("linear", 0.0),
    "cosine": ("cosine", 0.0),
    "cosine_with_min_lr": ("cosine", None),
    "cosine_warmup_with_min_lr": ("cosine", None),
}
"""`trainer.schedule.kind` and `final` of each schedule of transformers; None where another option gives `final`."""


def set_name(conv: Conversion, folder: str, name: str, fallback: str) -> None:
    """Sets `folder` and `name`: a folder of outputs alone gives both."""
    path = (conv.text(folder) or "").rstrip("/") if conv.has(folder) else ""
    called = conv.text(name) if conv.has(name) else None
    if path and called:
        conv.put("folder", path, folder)
        conv.put("name", _valid_name(called, fallback), name)
    elif path:
        parent, _, last = path.rpartition("/")
        conv.put("name", _valid_name(last, fallback), folder)
        conv.put("folder", parent or ("/" if path.startswith("/") else "."), folder)
    else:
        conv.put("name", _valid_name(called or fallback, fallback), *([name] if called else []), keep=True)


def _valid_name(text: str, fallback: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-._") or fallback


def set_model_path(conv: Conversion, *names: str) -> None:
    """Sets `model.path` from the first of these options that is given."""
    name = next((each for each in names if conv.has(each)), None)
    if name is None:
        conv.put("model.path", "MODEL", keep=True)
        conv.need("model.path", "the source names no known model: write a folder or a hub name")
    else:
        conv.put("model.path", conv.text(name), name)


def set_steps(conv: Conversion, steps: int | None, epochs: str, *names: str) -> int:
    """Sets `steps`; returns them, or the placeholder's number where they are not known.

    Args:
        epochs: the option that counts epochs.
        names: further options that the number comes from.
    """
    if steps is not None:
        conv.put("steps", max(1, steps), epochs, *names, keep=True)
        return max(1, steps)
    conv.put("steps", PLACEHOLDER_STEPS, keep=True)
    conv.refuse(epochs, "steps follow from the number of rows of the training data: give --rows N")
    conv.need("steps", f"{conv.framework} counts epochs: give --rows N, or set it (now {PLACEHOLDER_STEPS})")
    return PLACEHOLDER_STEPS


def set_schedule(
    conv: Conversion,
    kind: str,
    updates: int,
    warmup: Sequence[str],
    minimum: str = "",
    default: str = "constant",
    updates_per_count: int = 1,
) -> None:
    """Sets `trainer.schedule`.

    Args:
        kind: the option with the name of the schedule.
        updates: optimizer steps of the whole run.
        warmup: options for the warm-up, the one that counts first: shares if they are called ratios or are less than 1.
        minimum: the option with the lowest share of the learning rate.
        updates_per_count: optimizer steps per step that the source's schedule counts.
    """
    chosen = conv.text(kind) or default
    if chosen not in _SCHEDULES:
        conv.refuse(kind, f"the schedule {chosen[:40]} is not here: only constant, linear and cosine")
        return
    here, final = _SCHEDULES[chosen]
    conv.put("trainer.schedule.kind", here, kind, default=not conv.has(kind))
    lowest = conv.number(minimum) if minimum else None
    if here != "constant" and minimum and lowest is not None and (final is None or conv.has(minimum)):
        conv.put("trainer.schedule.final", lowest, minimum)
    elif here != "constant" and final is None:
        conv.put("trainer.schedule.final", 0.1, kind, default=True)
    for name in warmup:
        amount = conv.number(name)
        if amount is None or amount <= 0:
            continue
        share = "ratio" in name or amount < 1
        if share and amount > 1:
            conv.refuse(name, "a share of the steps is at most 1")
            break
        steps = math.ceil(amount * updates) if share else round(amount) * updates_per_count
        conv.put("trainer.schedule.warmup_steps", steps, name)
        if share and "steps" in conv.missing:
            conv.refuse(name, f"a share of the {updates} optimizer steps as written: it changes with steps")
        break
    for name in warmup:
        conv.drop(name, "another option sets the warm-up, or there is none")


def set_lowest_rate(conv: Conversion, name: str, highest: str) -> None:
    """Sets `trainer.schedule.final` from the lowest learning rate, which is a share of the highest here."""
    lowest, rate, schedule = conv.number(name), conv.number(highest), conv.fields.get("trainer.schedule.kind")
    if lowest and rate and schedule is not None and schedule.value != "constant":
        conv.put("trainer.schedule.final", lowest / rate, name, keep=True)
    conv.drop(name, "the learning rate is constant, or ends at 0")


def set_adapter(conv: Conversion, rank: str, others: Mapping[str, str], dropout: str, exact: bool) -> None:
    """Sets `model.adapter`.

    Args:
        rank: the option with the rank, 0 or absent for no adapter.
        others: fields of `model.adapter`, and the options that set them.
        exact: whether the recipe allows no dropout.
    """
    size = conv.integer(rank)
    if not size:
        for name in (rank, dropout, *others.values()):
            conv.drop(name, "all weights are trained")
        return
    conv.put("model.adapter.r", size, rank, keep=True)
    for key, name in others.items():
        value: Any = conv.raw(name)
        if key == "target_modules":
            value = target_modules(conv, name)
        elif key == "lora_alpha":
            value = conv.number(name)
        if value not in (None, "", []):
            conv.put(f"model.adapter.{key}", value, name)
    share = conv.number(dropout)
    if share and exact:
        text = "this recipe has no dropout in the adapter: its losses compare two forward passes of the same weights"
        conv.refuse(dropout, text)
        conv.note(f"{conv.shown(dropout)} {share:g} is left out: {text}")
    elif share is not None:
        conv.put("model.adapter.lora_dropout", share, dropout)


def target_modules(conv: Conversion, name: str) -> Any:
    """The modules of an adapter: `all-linear`, or a list."""
    names = conv.items(name)
    return "all-linear" if names == ["all-linear"] else names


def set_rows(conv: Conversion, budget: int | None, longest: int | None, *names: str) -> None:
    """Sets `token_budget` to the tokens of a micro-batch, and at least to those of one sequence."""
    if budget is not None or longest is not None:
        conv.put("token_budget", max(budget or 0, longest or 0), *names)


def set_quantization(conv: Conversion, four: str, eight: str = "", double: str = "") -> None:
    """Sets `model.quantization`, which only an adapter can have."""
    for name, kind in ((four, "nf4"), (eight, "int8")):
        if not name or not conv.on(name):
            if name:
                conv.drop(name, "it is off")
        elif "model.adapter.r" not in conv.fields:
            conv.refuse(name, "quantized weights cannot be trained: train an adapter, or leave it out")
        else:
            conv.put("model.quantization.kind", kind, name, keep=True)
            if double and kind == "nf4":
                conv.put("model.quantization.double_quant", conv.on(double), double)


def set_data(conv: Conversion, name: str, probs: str = "", several: bool = True) -> None:
    """Sets `data.path`, or `data.mixture` for several datasets with their weights.

    Args:
        several: whether the value may be a list.
    """
    paths = [] if not conv.has(name) else conv.items(name) if several else [conv.text(name) or ""]
    weights = conv.numbers(probs) if probs and conv.has(probs) else []
    if not paths:
        conv.put("data.path", "DATA", keep=True)
        conv.need("data.path", "the source names no known training data: write a file, a folder or a hub name")
    elif len(paths) == 1:
        conv.put("data.path", paths[0], name)
        if probs:
            conv.drop(probs, "there is one dataset")
    else:
        shares = weights if len(weights) == len(paths) else []
        if weights and not shares:
            conv.refuse(probs, "as many weights as datasets are needed: write them into data.mixture")
        sources: list[dict[str, Any]] = [{"path": path} for path in paths]
        for index, (source, path) in enumerate(zip(sources, paths, strict=True)):
            if shares:
                source["weight"] = shares[index]
            if sum(_label(path) == _label(each) for each in paths) > 1:
                source["label"] = f"{_label(path)}-{index + 1}"
        conv.put("data.mixture", sources, name, *([probs] if shares else []))


def _label(path: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "_", path.rstrip("/").rpartition("/")[2].partition(".")[0]) or "data"


def set_every(conv: Conversion, key: str, name: str, divisor: int = 1, keep: bool = False) -> None:
    """Sets a number of steps between two events; none or a negative number is 0, only at the end."""
    every = conv.number(name)
    value = 0 if every is None or every <= 0 else max(1, round(every / divisor))
    conv.put(key, value, name, keep=keep)


def set_kept(conv: Conversion, name: str) -> None:
    """Sets `checkpoint.keep_last`, which is at least two."""
    kept = conv.integer(name)
    if kept is not None and kept > 0:
        conv.put("checkpoint.keep_last", max(2, kept), name)
        if kept < 2:
            conv.note("checkpoint.keep_last is 2: step files are kept until the second newest checkpoint")


def add_term(conv: Conversion, term: dict[str, Any], *names: str) -> None:
    """Adds a term to `reward.terms`."""
    entry = conv.fields.get("reward.terms")
    terms = [*(entry.value if entry is not None else []), term]
    before = entry.names if entry is not None else ()
    conv.put("reward.terms", terms, *names, keep=True)
    now = conv.fields["reward.terms"]
    now.names, now.default = tuple(dict.fromkeys((*before, *now.names))), False


def add_length_penalty(conv: Conversion, buffer: int, longest: int, factor: str, *names: str) -> None:
    """Adds DAPO's soft penalty on completions of which the last `buffer` tokens before the limit are used.

    Args:
        longest: the limit, in tokens.
        factor: the option with the largest penalty, 1 in all frameworks.
        names: further options that the term comes from.
    """
    weight = conv.number_or(factor, 1.0)
    add_term(conv, {"kind": "length", "soft": longest - buffer, "hard": longest, "weight": weight}, *names, factor)


def repeat_data_fields(conv: Conversion, section: str, *keys: str) -> None:
    """Reads held-out data (`section`, such as `evaluation`) as the training data is read."""
    for key in keys:
        if (entry := conv.fields.get(f"data.{key}")) is not None:
            conv.put(f"{section}.data.{key}", entry.value, default=entry.default, keep=entry.keep)


def is_secret_variable(name: str, value: str) -> bool:
    """Whether a variable's value must not be written: by the variable's name, or by the value's form."""
    return is_secret_name(name) or secret_kind(value) is not None or bool(secret_values({name: value}))


def set_cluster_variables(conv: Conversion) -> None:
    """Sets `cluster.env` from Ray's runtime environment. Secrets are forwarded by name instead of being written."""
    plain: dict[str, str] = {}
    by_name: list[str] = []
    for name, word in conv.source.variables.items():
        if matching_reason(name, RESERVED_VARIABLES) is not None:
            continue
        if not word.known or is_secret_variable(name, word.text):
            by_name.append(name)
        else:
            plain[name] = word.text
    if plain:
        conv.put("cluster.env", plain, keep=True)
    forward_variables(conv, by_name)


def forward_variables(conv: Conversion, names: Sequence[str], *options: str) -> None:
    """Adds variables whose values must not be written to `cluster.forward_env`."""
    if not names:
        return
    entry, usual = conv.fields.get("cluster.forward_env"), RayClusterConfig.model_fields["forward_env"].default
    patterns = list(entry.value if entry is not None else usual)
    others = sorted(name for name in names if not any(fnmatchcase(name, each) for each in patterns))
    if others:
        conv.put("cluster.forward_env", [*patterns, *others], *options, keep=True)
    for option in options:
        conv.drop(option, "cluster.forward_env has the variable")
    conv.note(
        f"export {', '.join(sorted(names))} where the run is started: cluster.forward_env gives it to the workers"
    )


def set_ranks(conv: Conversion, nodes: int, per_node: int, *names: str) -> int:
    """Sets ranks and placement of the policy on a Ray cluster; returns the number of ranks."""
    conv.put("trainer.ranks", nodes * per_node, *names)
    conv.put("cluster.kind", "ray", keep=True)
    conv.put("placement.policy.nodes", nodes, names[0])
    conv.put("placement.policy.gpus_per_node", per_node, names[1])
    return nodes * per_node


def set_launcher_ranks(conv: Conversion) -> None:
    """Sets `trainer.ranks` to the processes that the launcher starts; one, and to be set, if that is not known."""
    known = conv.facts.ranks or conv.source.ranks
    if known is None:
        conv.need("trainer.ranks", "the launcher's number of GPUs is not in the source: give --ranks N, or set it")
    conv.put("trainer.ranks", known or 1, keep=True)


def divide_step(conv: Conversion, total: int, group: int, size: int, *names: str) -> int:
    """Sets `minibatch_size` to completions per optimizer step; returns the optimizer steps of one pass.

    It must be a multiple of the group and divide the step: the nearest such number is written if it is not.
    """
    prompts = max(1, total // group)
    small = [each for each in range(1, math.isqrt(prompts) + 1) if prompts % each == 0]
    valid = [each * group for each in {*small, *(prompts // each for each in small)}]
    nearest = min(valid, key=lambda each: (abs(each - size), each)) if valid else total
    conv.put("minibatch_size", nearest, *names)
    if nearest != size:
        remedy = f"{size} completions per optimizer step do not divide the step's {total} in groups of {group}: "
        for name in names:
            conv.refuse(name, f"{remedy}minibatch_size is {nearest}")
    return max(1, total // nearest)
