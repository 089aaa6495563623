"""Rules of OpenRLHF's `train_ppo_ray`: rollouts, advantages, KL, rewards and placement."""

import math
from typing import Any

from lockstep.convert import shared_fields as fields
from lockstep.convert.conversion import Conversion
from lockstep.convert.critic_fields import PPO, set_openrlhf_critic
from lockstep.convert.errors import NotConvertible
from lockstep.convert.openrlhf.openrlhf_placement import place_policy, share_devices

_ESTIMATORS = {
    "group_norm": "grpo",
    "dr_grpo": "dr_grpo",
    "rloo": "rloo",
    "reinforce": "reinforce_plus_plus",
    "reinforce_baseline": "reinforce_plus_plus_baseline",
}


def convert_rollouts(conv: Conversion) -> str:
    """Sets the fields of a run with rollouts; returns the recipe."""
    recipe = _set_advantage(conv)
    _set_lengths(conv)
    _set_batches(conv)
    _set_kl(conv)
    _set_loss(conv)
    _set_engines(conv)
    place_policy(conv)
    _set_rewards(conv)
    _set_evaluation(conv)
    if recipe == PPO:
        set_openrlhf_critic(conv)
    share_devices(conv)
    return recipe


def set_prompt_text(conv: Conversion, chat: str, template: str) -> None:
    """Sets how prompts become text: by the chat template, or by one with `{}` for the prompt."""
    if conv.on(chat):
        conv.put("data.chat", True, chat)
        conv.drop(template, "the chat template takes its place")
    elif (text := conv.text(template)) and "{}" not in text:
        conv.refuse(template, "it has no {} for the prompt, so that all prompts would be the same")
    elif text:
        plain = text.replace("{}", "\0").replace("{", "{{").replace("}", "}}").replace("\0", "{prompt}")
        conv.put("data.template", plain, template)


def known_rows(conv: Conversion) -> int | None:
    """The number of rows that are trained on; None if it is not known."""
    rows, limit = conv.facts.rows, conv.integer("data.max_samples")
    return min(rows, limit) if rows is not None and limit else rows


def set_openrlhf_schedule(conv: Conversion, updates: int) -> None:
    """Sets the schedule of the policy's learning rate."""
    warmup = ["actor.lr_warmup_ratio"]
    fields.set_schedule(conv, "actor.lr_scheduler", updates, warmup, "actor.min_lr_ratio", "cosine_with_min_lr")


def _set_advantage(conv: Conversion) -> str:
    """Sets the estimator; returns the recipe that has it."""
    name = "algo.advantage.estimator"
    chosen = conv.text(name) or "gae"
    if chosen == "gae":
        return PPO
    if chosen not in _ESTIMATORS:
        known = ", ".join(_ESTIMATORS)
        raise NotConvertible(f"{conv.shown(name)} {chosen[:40]} has no counterpart: use one of {known}")
    conv.put("advantage.kind", _ESTIMATORS[chosen], name, keep=True)
    if chosen == "group_norm":
        conv.put("advantage.epsilon", 1e-9, name, default=True)
    if chosen in ("group_norm", "dr_grpo", "rloo"):
        conv.drop("algo.advantage.no_std_norm", "this estimator is not normalised over the step")
    return "grpo"


def _set_lengths(conv: Conversion) -> None:
    """Older versions limit prompt and completion, newer ones their sum."""
    new, total = conv.integer("rollout.max_new_tokens"), conv.count("data.max_len", 2048)
    prompt = conv.integer("prompt_max_len")
    if prompt is not None and not conv.has("data.max_len"):
        new = new or 1024
        total = prompt + new
    elif new is None:
        new = total // 2
        conv.need(
            "rollout.sampling.max_tokens",
            f"OpenRLHF gives a completion what its prompt leaves of {total} tokens; here it is half: set it to the "
            "longest completion",
        )
    conv.put("data.prompt_column", conv.text("data.input_key") or "input", "data.input_key")
    split = prompt is not None and not conv.has("data.max_len")
    names = ("prompt_max_len", "rollout.max_new_tokens") if split else ("data.max_len",)
    conv.put("model.max_length", total, *names)
    conv.put("rollout.sampling.max_tokens", new, "rollout.max_new_tokens", keep=True)
    conv.put("data.overlong", "drop", default=True)
    if conv.on("train.dynamic_batch_enable"):
        budget = conv.integer("train.max_tokens_per_gpu")
        fields.set_rows(conv, budget, total, "train.max_tokens_per_gpu", "train.dynamic_batch_enable")
        conv.drop("train.micro_batch_size", "rows are filled with tokens")
    else:
        micro = conv.count("train.micro_batch_size", 1)
        fields.set_rows(conv, micro * total, total, "train.micro_batch_size", "data.max_len")


def _set_batches(conv: Conversion) -> None:
    prompts = conv.count("rollout.batch_size", 1024)
    group = conv.count("rollout.n_samples_per_prompt", 1)
    conv.put("prompts_per_step", prompts, "rollout.batch_size")
    conv.put("group_size", group, "rollout.n_samples_per_prompt")
    passes = conv.count("train.max_epochs", 1)
    conv.put("epochs", passes, "train.max_epochs")
    size = conv.count("train.batch_size", 128)
    updates = fields.divide_step(conv, prompts * group, group, size, "train.batch_size") * passes
    rows = known_rows(conv)
    episodes = conv.count("train.num_episodes", 1)
    steps = None if rows is None else episodes * max(1, rows // prompts)
    set_openrlhf_schedule(conv, updates * fields.set_steps(conv, steps, "train.num_episodes", "rollout.batch_size"))


def _set_kl(conv: Conversion) -> None:
    coefficient = conv.number_or("algo.kl.init_coef", 0.0)
    conv.put("loss.kl.coefficient", coefficient, "algo.kl.init_coef")
    if not coefficient:
        return
    conv.put("loss.kl.where", "loss" if conv.on("algo.kl.use_loss") else "reward", "algo.kl.use_loss")
    if conv.on("use_kl_estimator_k3"):
        conv.put("loss.kl.estimator", "k3", "use_kl_estimator_k3", keep=True)
    else:
        conv.put("loss.kl.estimator", conv.text("algo.kl.estimator") or "k1", "algo.kl.estimator")


def _set_loss(conv: Conversion) -> None:
    gspo = conv.text("actor.policy_loss_type") == "gspo"
    conv.put("loss.kind", "gspo" if gspo else "ppo_clip", "actor.policy_loss_type", keep=True)
    both = conv.numbers("actor.eps_clip_low_high") if conv.has("actor.eps_clip_low_high") else []
    name = "actor.eps_clip_low_high" if len(both) == 2 else "actor.eps_clip"
    clip = conv.number_or("actor.eps_clip", 0.2)
    low, high = both if len(both) == 2 else (clip, clip)
    conv.put("loss.clip_low", low, name)
    conv.put("loss.clip_high", high, name)
    conv.drop("actor.eps_clip", "--actor.eps_clip_low_high takes its place")
    if gspo:
        conv.put("loss.aggregation", "seq-mean-token-mean", default=True)
        for each in ("actor.dual_clip", "actor.loss_agg_mode"):
            conv.refuse(each, "it does not apply to GSPO here: leave it out")
    conv.put("loss.old_logprobs", "trainer", default=True, keep=True)
    _set_correction(conv)
    if conv.on("train.async_enable"):
        queue = conv.count("train.async_queue_size", 1)
        conv.put("rollout.max_staleness", queue, "train.async_enable", "train.async_queue_size", keep=True)
        if "loss.importance.kind" not in conv.fields:
            conv.put("loss.old_logprobs", "engine", "train.async_enable", keep=True)


def _set_correction(conv: Conversion) -> None:
    """Importance correction: its level and mode, or the older switch with a type."""
    level, mode, bounds = (f"algo.advantage.is_correction_{each}" for each in ("level", "mode", "threshold"))
    chosen = (conv.text(level) or "off").lower()
    if chosen in ("off", "false"):
        return
    kind = conv.text(mode) or "tis"
    if kind == "seq-mask-tis" or chosen not in ("true", "token", "seq"):
        conv.refuse(mode, "its geometric mean is not here: use tis or icepop")
        conv.refuse(level, "see the correction's type")
        return
    masks = kind in ("icepop", "mask")
    conv.put("loss.importance.kind", "mask" if masks else "truncate", level, mode, keep=True)
    conv.put("loss.importance.level", "sequence" if chosen == "seq" else "token", level, keep=True)
    limits = conv.numbers(bounds) or [0.5, 5.0]
    conv.put("loss.importance.cap", limits[-1], bounds)
    if masks and len(limits) == 2:
        conv.put("loss.importance.floor", limits[0], bounds)
    elif len(limits) == 2 and limits[0]:
        conv.note(f"truncated importance weights have no lower bound here, {limits[0]:g} in OpenRLHF")


def _set_engines(conv: Conversion) -> None:
    count = conv.integer("vllm.num_engines")
    names = ("tensor_parallel_size", "gpu_memory_utilization", "enforce_eager", "enable_prefix_caching")
    if not count:
        for name in ("vllm.num_engines", *(f"vllm.{each}" for each in names)):
            conv.drop(name, "there are no vLLM engines")
        return
    conv.put("rollout.engine.kind", "vllm", "vllm.num_engines", keep=True)
    conv.put("rollout.engine.count", count, "vllm.num_engines")
    parallel = conv.integer("vllm.tensor_parallel_size")
    conv.put("rollout.engine.tensor_parallel_size", parallel, "vllm.tensor_parallel_size")
    share = conv.number("vllm.gpu_memory_utilization")
    conv.put("rollout.engine.gpu_memory_utilization", share, "vllm.gpu_memory_utilization")
    for name in names[2:]:
        conv.put(f"rollout.engine.{name}", conv.on(f"vllm.{name}"), f"vllm.{name}")


def _set_rewards(conv: Conversion) -> None:
    addresses = conv.items("reward.remote_url")
    for address in addresses[:1]:
        if address.endswith(".py"):
            add = {"kind": "function", "path": f"{address}:reward_func", "signature": "openrlhf"}
        else:
            add = {"kind": "http", "url": address, "signature": "openrlhf"}
        fields.add_term(conv, add, "reward.remote_url")
    if len(addresses) > 1:
        conv.refuse(
            "reward.remote_url",
            f"OpenRLHF divides completions between the {len(addresses)} addresses: a term has one, the first; put a "
            "load balancer in front of the others",
        )
    if conv.has("train.agent_func_path"):
        path = conv.text("train.agent_func_path")
        conv.put("rollout.environment.path", f"{path}:AgentInstance", "train.agent_func_path")
        fields.add_term(conv, {"kind": "environment"}, "train.agent_func_path")
        conv.refuse("train.agent_func_path", "give its class the methods reset and step of docs/environments.md")
    if "reward.terms" not in conv.fields:
        _add_reward_models(conv)
    else:
        conv.drop("reward.model_name_or_path", "the remote reward takes its place")
    if "reward.terms" not in conv.fields:
        fields.add_term(conv, {"kind": "exact_match"})
        conv.need("reward.terms", "the source names no reward: replace exact_match")
    _set_penalties(conv)


def _add_reward_models(conv: Conversion) -> None:
    """Reward models, which OpenRLHF normalises by the mean and the deviation in their configs."""
    normalised, sizes = "reward.normalize_enable", ("reward.num_nodes", "reward.num_gpus_per_node")
    paths = conv.items("reward.model_name_or_path")
    details: dict[str, Any] = {"normalize": True} if conv.on(normalised) else {}
    if any(conv.has(each) for each in sizes) or conv.on("train.colocate_critic_reward"):
        details = {"ranks": conv.count(sizes[0], 1) * conv.count(sizes[1], 8), **details}
    elif conv.on("train.colocate_all"):
        details = {"ranks": conv.fields["trainer.ranks"].value, **details}
    for path in paths:
        fields.add_term(conv, {"kind": "model", "path": path, **details}, "reward.model_name_or_path")
    if paths:
        terms = conv.fields["reward.terms"].value
        used = [each for each in (*sizes, normalised) if conv.has(each)]
        conv.put("reward.terms", terms, "reward.model_name_or_path", *used, keep=True)


def _set_penalties(conv: Conversion) -> None:
    buffer = conv.integer("reward.overlong_buffer_len")
    longest = int(conv.fields["rollout.sampling.max_tokens"].value)
    if buffer and buffer < longest:
        fields.add_length_penalty(conv, buffer, longest, "reward.overlong_penalty_factor", "reward.overlong_buffer_len")
    if conv.text("algo.advantage.estimator") == "gae":
        return  # the critic's rules set the limits of rewards
    bounds = conv.numbers("reward.clip_range") or [-10.0, 10.0]
    if conv.has("reward.clip_range") and all(math.isfinite(each) for each in bounds):
        conv.refuse("reward.clip_range", "rewards are not clipped: clip them in the reward function")
    else:
        conv.note("rewards are not clipped; OpenRLHF clips them to -10..10 by default")


def _set_evaluation(conv: Conversion) -> None:
    if not conv.has("eval.dataset"):
        for name in ("eval.split", "eval.steps", "eval.temperature", "eval.n_samples_per_prompt"):
            conv.drop(name, "no data for evaluation is given")
        return
    conv.put("evaluation.data.path", conv.text("eval.dataset"), "eval.dataset")
    conv.put("evaluation.data.split", conv.text("eval.split"), "eval.split")
    fields.set_every(conv, "evaluation.every", "eval.steps")
    conv.put("evaluation.sampling.temperature", conv.number("eval.temperature"), "eval.temperature", keep=True)
    tokens = conv.fields["rollout.sampling.max_tokens"].value
    conv.put("evaluation.sampling.max_tokens", tokens, "rollout.max_new_tokens", keep=True)
    fields.repeat_data_fields(conv, "evaluation", "prompt_column", "answer_column", "template", "chat", "overlong")
    for key, name in (("prompt_column", "data.input_key"), ("answer_column", "data.label_key")):
        if value := conv.text(name):
            conv.put(f"evaluation.data.{key}", value, name)
    if not conv.has("eval.n_samples_per_prompt"):
        conv.note("an evaluation samples one completion per prompt, 4 in OpenRLHF")
