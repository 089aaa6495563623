"""Rules of OpenRLHF's `train_ppo_ray`: GPUs of each model, and which models share them."""

from typing import Any

from lockstep.config.cluster import COLOCATED_PAIRS
from lockstep.convert import shared_fields as fields
from lockstep.convert.conversion import Conversion

_ALL, _ACTOR_REF, _CRITIC_REWARD = (f"train.colocate_{each}" for each in ("all", "actor_ref", "critic_reward"))
_REFERENCE_SIZES = ("ref.num_nodes", "ref.num_gpus_per_node")


def place_policy(conv: Conversion) -> None:
    """Sets ranks and placement of policy and reference, and how weights reach the engines."""
    sizes = ("actor.num_nodes", "actor.num_gpus_per_node")
    fields.set_ranks(conv, conv.count(sizes[0], 1), conv.count(sizes[1], 8), *sizes)
    fields.set_cluster_variables(conv)
    if _all_take_turns(conv):
        if conv.on("ds.enable_sleep"):
            conv.put("trainer.offload.parameters", True, "ds.enable_sleep")
            conv.put("trainer.offload.optimizer", True, "ds.enable_sleep")
        conv.drop("vllm.sync_backend", "weights of engines that share the trainer's GPUs stay on them")
    elif conv.has("vllm.sync_backend"):
        known = conv.text("vllm.sync_backend") in ("nccl", "gloo")
        conv.put("weights.transport", conv.text("vllm.sync_backend") if known else "auto", "vllm.sync_backend")
    conv.drop("ds.enable_sleep", "engines have GPUs of their own")
    _place_reference(conv)


def _all_take_turns(conv: Conversion) -> bool:
    """Whether engines share the GPUs of the models: those of asynchronous training have GPUs of their own."""
    return conv.on(_ALL) and not conv.on("train.async_enable")


def _place_reference(conv: Conversion) -> None:
    """Processes for the reference, where it has GPUs of its own, or leaves those of the policy in turns."""
    nodes, per_node = conv.count(_REFERENCE_SIZES[0], 1), conv.count(_REFERENCE_SIZES[1], 8)
    needed = bool(conv.fields["loss.kl.coefficient"].value) and "model.adapter.r" not in conv.fields
    turns = [each for each in (_ACTOR_REF, _ALL) if conv.on(each) and (each == _ACTOR_REF or conv.on("ref.offload"))]
    if needed and turns:
        conv.put("reference.ranks", conv.fields["trainer.ranks"].value, *turns[:1], *_REFERENCE_SIZES)
        conv.drop("ref.offload", "a reference that shares GPUs leaves them while others compute")
    elif needed and not conv.on(_ALL) and any(conv.has(each) for each in _REFERENCE_SIZES):
        conv.put("reference.ranks", nodes * per_node, *_REFERENCE_SIZES)
        conv.put("placement.reference.nodes", nodes, _REFERENCE_SIZES[0])
        conv.put("placement.reference.gpus_per_node", per_node, _REFERENCE_SIZES[1])
    elif not needed:
        conv.drop("ref.offload", "there is no reference, or it is the policy without its adapter")
        conv.drop(_ACTOR_REF, "there is no reference, or it is the policy without its adapter")
    for name in _REFERENCE_SIZES:
        conv.drop(name, "the policy's ranks hold the reference, or there is none")


def share_devices(conv: Conversion) -> None:
    """Sets `placement.colocate`, after the fields of all roles. Roles of a set have equally many ranks."""
    ranks = _ranks(conv)
    wanted: list[tuple[str, list[str]]] = []
    if conv.on(_ALL):
        engines = ["rollout"] if _all_take_turns(conv) else []
        wanted.append((_ALL, ["policy", *engines, "critic", "reference", "reward_model"]))
    elif conv.on(_ACTOR_REF):
        wanted.append((_ACTOR_REF, ["policy", "reference"]))
    if not conv.on(_ALL) and conv.on(_CRITIC_REWARD):
        wanted.append((_CRITIC_REWARD, ["critic", "reward_model"]))
    sets: list[Any] = []
    names: list[str] = []
    for name, roles in wanted:
        present = [each for each in roles if each in ranks]
        equal = [each for each in present if each == "rollout" or ranks[each] == ranks[present[0]]]
        for other in (each for each in present if each not in equal):
            conv.note(f"{other} shares no GPUs: it has {ranks[other]} ranks, and {present[0]} {ranks[present[0]]}")
        if len(equal) > 1:
            whole = "rollout" in equal and equal == present
            sets.append("all" if whole else next((k for k, v in COLOCATED_PAIRS.items() if v == tuple(equal)), equal))
            names.append(name)
    if sets:
        conv.put("placement.colocate", sets[0] if len(sets) == 1 else sets, *names)
    conv.drop(_ALL, "asynchronous engines have GPUs of their own here, as there, and the policy's ranks are alone")
    conv.drop(_ACTOR_REF, "the policy's ranks hold the reference")
    conv.drop(_CRITIC_REWARD, "it needs a critic, and a reward model in processes of the run")


def _ranks(conv: Conversion) -> dict[str, int]:
    """The ranks of the run's roles, engines with those whose GPUs they may use."""
    found = {"policy": int(conv.fields["trainer.ranks"].value), "rollout": int(conv.fields["trainer.ranks"].value)}
    for role, key in (("reference", "reference.ranks"), ("critic", "critic.trainer.ranks")):
        if key in conv.fields:
            found[role] = int(conv.fields[key].value)
    models = [each for each in conv.fields["reward.terms"].value if each["kind"] == "model" and "path" in each]
    if models:
        found["reward_model"] = int(models[0].get("ranks", 1))
    return found
