"""Rules of verl's rewards: a function, verl's own scores, a penalty on length, a reward model."""

from collections.abc import Sequence
from typing import Any

from lockstep.convert import shared_fields as fields
from lockstep.convert.conversion import Conversion, typed_value

_PATH, _NAME = "reward.custom_reward_function.path", "reward.custom_reward_function.name"
_ARGUMENTS = ("reward.custom_reward_function.reward_kwargs.", "custom_reward_function.reward_kwargs.")
_MANAGER, _BUFFER = "reward.reward_manager.name", "reward_model.overlong_buffer"
_MODEL, _MODEL_PATH = "reward.reward_model.enable", "reward.reward_model.model_path"
_POOL = "reward.reward_model.enable_resource_pool"
_POOL_SIZES = ("reward.reward_model.nnodes", "reward.reward_model.n_gpus_per_node")


def set_verl_rewards(conv: Conversion) -> None:
    """Sets `reward.terms`."""
    manager = conv.text(_MANAGER) or "naive"
    if conv.has(_PATH):
        _set_function(conv, manager)
    elif conv.on(_MODEL):
        term = {"kind": "model", "path": conv.text(_MODEL_PATH) or "", "end": "template"}
        sizes = _POOL_SIZES if conv.on(_POOL) else ()
        ranks = conv.count(sizes[0], 1) * conv.count(sizes[1], 8) if sizes else conv.fields["trainer.ranks"].value
        fields.add_term(conv, {**term, "ranks": ranks}, _MODEL, _MODEL_PATH, *sizes)
    else:
        fields.add_term(conv, {"kind": "math"})
        conv.need(
            "reward.terms",
            "verl scores by the column data_source; kind math compares the last expression with the answer: "
            "check that it suits the data, or name a function",
        )
    if conv.has(_PATH) and conv.on(_MODEL):
        conv.refuse(_MODEL, "the function may use it: serve it for the function, or add a term for it to reward.terms")
        conv.drop(_MODEL_PATH, "see the option that enables it")
    if manager not in ("naive", "dapo", "batch", "prime"):
        conv.refuse(_MANAGER, f"the reward manager {manager[:30]} is not here: naive, dapo or batch")
    conv.drop(_MANAGER, "functions are called in scorer processes")
    _set_filter(conv)
    _set_buffer(conv)


def place_reward_model(conv: Conversion) -> None:
    """Sets where a reward model is: on GPUs of its own, or on those of the other roles."""
    served = any(each["kind"] == "model" for each in conv.fields["reward.terms"].value)
    if served and conv.on(_POOL):
        conv.put("placement.reward_model.nodes", conv.count(_POOL_SIZES[0], 1), _POOL_SIZES[0])
        conv.put("placement.reward_model.gpus_per_node", conv.count(_POOL_SIZES[1], 8), _POOL_SIZES[1])
        if "placement.colocate" in conv.fields:
            keys = {"critic": "critic.trainer.ranks", "reference": "reference.ranks"}
            others = [role for role, key in keys.items() if key in conv.fields]
            conv.put(
                "placement.colocate",
                ["policy", "rollout", *others],
                "actor_rollout_ref.hybrid_engine",
                _POOL,
                keep=True,
            )
    for name in (_POOL, *_POOL_SIZES):
        conv.drop(name, "no reward model has GPUs of its own")


def _set_filter(conv: Conversion) -> None:
    """What must differ within a group: all terms together, or the first one alone (verl's accuracy)."""
    metric, limit = "algorithm.filter_groups.metric", "algorithm.filter_groups.max_num_gen_batches"
    if not conv.on("algorithm.filter_groups.enable"):
        return
    chosen = conv.text(metric)
    if chosen in ("acc", "score"):
        term = conv.fields["reward.terms"].value[0]
        name = str(term["path"]).rpartition(":")[2] if "path" in term else term["kind"]
        conv.put("filter_groups.metric", name, metric, keep=True)
    elif chosen in ("seq_reward", "seq_final_reward"):
        conv.put("filter_groups.metric", "reward", metric, keep=True)
    else:
        conv.refuse(metric, "use acc, score, seq_reward or seq_final_reward")
    rounds = conv.integer(limit)
    if rounds is not None:
        conv.put("filter_groups.max_num_gen_batches", rounds if rounds > 0 else 1_000_000, limit)
    conv.put("filter_groups.at_limit", "error", default=True)


def _set_function(conv: Conversion, manager: str) -> None:
    name = conv.text(_NAME) or "compute_score"
    term: dict[str, Any] = {"kind": "function", "path": f"{conv.text(_PATH)}:{name}"}
    term["signature"] = "verl_batch" if manager == "batch" else "verl"
    given = [each for each in conv.given if each.startswith(_ARGUMENTS) and conv.passes_on(each)]
    if given:
        term["arguments"] = _arguments(conv, given)
    fields.add_term(conv, term, _PATH, _NAME, *given)


def _arguments(conv: Conversion, names: Sequence[str]) -> dict[str, Any]:
    """The further arguments of a function, of which some are mappings."""
    arguments: dict[str, Any] = {}
    for name in names:
        prefix = next(each for each in _ARGUMENTS if name.startswith(each))
        *parents, last = name.removeprefix(prefix).split(".")
        section = arguments
        for part in parents:
            inner = section.get(part)
            section[part] = section = inner if isinstance(inner, dict) else {}
        section[last] = typed_value(conv.raw(name), None)
    return arguments


def _set_buffer(conv: Conversion) -> None:
    """DAPO's soft penalty on completions that come close to the limit."""
    names = [f"{_BUFFER}.{each}" for each in ("enable", "len", "penalty_factor")]
    length, longest = conv.integer(names[1]), int(conv.fields["rollout.sampling.max_tokens"].value)
    if conv.on(names[0]) and length and 0 < length < longest:
        fields.add_length_penalty(conv, length, longest, names[2], *names[:2])
