"""Fields of PPO's critic, its advantages and its rewards, from OpenRLHF's and verl's options for `gae`."""

from typing import Any

from lockstep.convert.conversion import Conversion, FieldEntry, typed_value

PPO = "ppo"
_OPENRLHF = {
    "advantage.gamma": "algo.advantage.gamma",
    "advantage.lam": "algo.advantage.lambd",
    "critic.trainer.optimizer.lr": "critic.adam.lr",
    "critic.trainer.optimizer.betas": "critic.adam.betas",
    "critic.trainer.optimizer.weight_decay": "critic.adam.weight_decay",
    "critic.trainer.max_grad_norm": "critic.max_norm",
    "critic.loss.clip": "critic.value_clip",
    "critic.export": "critic.save_value_network",
}
_VERL = {
    "advantage.gamma": "algorithm.gamma",
    "advantage.lam": "algorithm.lam",
    "critic.trainer.optimizer.lr": "critic.optim.lr",
    "critic.trainer.optimizer.betas": "critic.optim.betas",
    "critic.trainer.optimizer.weight_decay": "critic.optim.weight_decay",
    "critic.trainer.max_grad_norm": "critic.grad_clip",
    "critic.trainer.activation_checkpointing": "critic.model.enable_gradient_checkpointing",
    "critic.trainer.offload.parameters": "critic.fsdp.param_offload",
    "critic.trainer.offload.optimizer": "critic.fsdp.optimizer_offload",
    "critic.loss.clip": "critic.cliprange_value",
}
_OF_THE_POLICY = ("activation_checkpointing", "reshard_after_forward", "schedule.kind", "schedule.final", "replicas")
"""Fields of the policy's trainer that OpenRLHF's critic shares."""


def _copy(conv: Conversion, pairs: dict[str, str]) -> None:
    for key, name in pairs.items():
        value: Any = typed_value(conv.raw(name), conv.option(name))
        if value is not None:
            conv.put(key, value, name)


def set_openrlhf_critic(conv: Conversion) -> None:
    """Sets the fields of the critic of `train_ppo_ray`, after those of the policy."""
    conv.put("advantage.kind", "gae", "algo.advantage.estimator", keep=True)
    _copy(conv, _OPENRLHF)
    for field in ("betas", "weight_decay"):  # older versions have one option for both models
        key, name = f"critic.trainer.optimizer.{field}", f"actor.adam.{field}"
        if key not in conv.fields:
            conv.put(key, typed_value(conv.raw(name), conv.option(name)), name)
    if conv.on("algo.advantage.no_std_norm"):
        conv.put("advantage.whiten", "mean", "algo.advantage.no_std_norm")
    frozen = conv.integer("critic.freezing_steps") or 0
    conv.put("critic.warmup_steps", max(0, frozen), "critic.freezing_steps")
    _keep_warmup_targets(conv, frozen, "algo.advantage.lambd")
    starts = "critic.model_name_or_path" if conv.has("critic.model_name_or_path") else "reward.model_name_or_path"
    if conv.has(starts):
        conv.put("critic.model.path", conv.items(starts)[0], starts)
    for field in _OF_THE_POLICY:
        _share(conv, field)
    _share(conv, "schedule.warmup_steps")
    nodes, per_node = conv.count("critic.num_nodes", 1), conv.count("critic.num_gpus_per_node", 8)
    conv.put("critic.trainer.ranks", nodes * per_node, "critic.num_nodes", "critic.num_gpus_per_node")
    conv.put("placement.critic.nodes", nodes, "critic.num_nodes")
    conv.put("placement.critic.gpus_per_node", per_node, "critic.num_gpus_per_node")
    if bounds := conv.numbers("reward.clip_range"):
        conv.put("reward_clip", bounds, "reward.clip_range", keep=True)
    if target := conv.number("algo.kl.target"):
        conv.put("kl_controller.target", target, "algo.kl.target", keep=True)
        conv.put("kl_controller.horizon", conv.integer("algo.kl.horizon"), "algo.kl.horizon")


def _keep_warmup_targets(conv: Conversion, frozen: int, lam: str) -> None:
    """Gives the critic the same targets in its warm-up as later, as both frameworks do.

    Args:
        frozen: steps of the warm-up.
        lam: the option that sets the advantages' lambda.
    """
    if frozen > 0 and (entry := conv.fields.get("advantage.lam")) is not None:
        conv.put("critic.warmup_lam", entry.value, lam)


def _share(conv: Conversion, field: str) -> None:
    """Gives the critic's trainer a field of the policy's, in the config as it will be."""
    sources = {"activation_checkpointing": "actor.gradient_checkpointing_enable"}
    if (entry := conv.fields.get(f"trainer.{field}")) is not None:
        conv.fields[f"critic.trainer.{field}"] = FieldEntry(entry.value, entry.names, entry.default, entry.keep)
    elif field in sources and conv.on(sources[field]):
        conv.put(f"critic.trainer.{field}", True, sources[field])


def set_verl_critic(conv: Conversion, ranks: int, updates: int) -> None:
    """Sets the fields of verl's critic, after those of the policy.

    Args:
        ranks: of the policy; the critic is on the same GPUs.
        updates: optimizer steps of the whole run.
    """
    conv.put("advantage.kind", "gae", "algorithm.adv_estimator", keep=True)
    _copy(conv, _VERL)
    conv.put("critic.trainer.ranks", ranks, "trainer.n_gpus_per_node", keep=True)
    frozen = conv.integer("trainer.critic_warmup") or 0
    conv.put("critic.warmup_steps", max(0, frozen), "trainer.critic_warmup")
    _keep_warmup_targets(conv, frozen, "algorithm.lam")
    if conv.has("critic.model.path"):
        conv.put("critic.model.path", conv.text("critic.model.path"), "critic.model.path")
    share = conv.number_or("critic.optim.lr_warmup_steps_ratio", 0.0)
    conv.put("critic.trainer.schedule.warmup_steps", round(share * updates), "critic.optim.lr_warmup_steps_ratio")
    conv.put("reward_clip", None, default=True, keep=True)
    if "loss.kl.coefficient" not in conv.fields:
        conv.put("loss.kl.coefficient", 0.0, "algorithm.use_kl_in_reward", keep=True, default=True)
    elif conv.text("algorithm.kl_ctrl.type") == "adaptive" and conv.fields["loss.kl.where"].value == "reward":
        conv.put(
            "kl_controller.target", conv.number("algorithm.kl_ctrl.target_kl"), "algorithm.kl_ctrl.target_kl", keep=True
        )
        conv.put("kl_controller.horizon", conv.integer("algorithm.kl_ctrl.horizon"), "algorithm.kl_ctrl.horizon")
        conv.outcomes.pop("algorithm.kl_ctrl.type", None)
        conv.drop("algorithm.kl_ctrl.type", "there is a kl_controller")
