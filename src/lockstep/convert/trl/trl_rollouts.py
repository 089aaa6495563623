"""Rules of TRL's GRPO and RLOO: batches, losses, engines and rewards."""

from collections.abc import Callable
from typing import Any

from lockstep.convert import shared_fields as fields
from lockstep.convert.conversion import Conversion
from lockstep.convert.inference_stages import SERVER, stage_option

_AGGREGATIONS = {"dapo": "token-mean", "grpo": "seq-mean-token-mean", "dr_grpo": "seq-mean-token-sum-norm"}
_THINK_FORMAT = r"(?s)^<think>(?!.*<think>)(.*?)</think>.*$"
BATCH = ("per_device_train_batch_size", "gradient_accumulation_steps")
"""What samples per optimizer step and process are made of."""


def optimizer_batch(conv: Conversion, ranks: int) -> int:
    """Samples per optimizer step, over all processes."""
    return conv.count(BATCH[0], 8) * conv.count(BATCH[1], 1) * ranks


def set_trl_rollouts(conv: Conversion, ranks: int, set_rewards: Callable[[Conversion], None] | None = None) -> int:
    """Sets the fields of a run with rollouts; returns the optimizer steps of a step.

    Args:
        set_rewards: sets the reward terms, for frameworks that have others than TRL.
    """
    updates = _set_batches(conv, ranks)
    _set_advantage(conv)
    _set_loss(conv)
    set_trl_engine(conv, ranks)
    (set_rewards or set_trl_rewards)(conv)
    return updates


def _set_batches(conv: Conversion, ranks: int) -> int:
    """TRL generates `generation_batch_size` completions at once, and trains on them in optimizer steps."""
    size, group = optimizer_batch(conv, ranks), conv.count("num_generations", 8)
    per_generation = conv.integer("steps_per_generation")
    total, names = size, list(BATCH)
    if conv.has("generation_batch_size"):
        total, names = conv.integer("generation_batch_size") or size, ["generation_batch_size", *BATCH]
    elif conv.has("steps_per_generation") and per_generation:
        total = conv.count(BATCH[0], 8) * ranks * per_generation
        names = [BATCH[0], "steps_per_generation"]
    if total % group:
        known = conv.facts.ranks is not None or conv.source.ranks is not None
        conv.need(
            "prompts_per_step",
            f"{total} completions of a generation are no multiple of num_generations {group}: "
            + ("change one of them" if known else "give --ranks N"),
        )
        total = max(1, total // group) * group
    conv.put("prompts_per_step", total // group, *names, "num_generations", keep=True)
    conv.put("group_size", group, "num_generations", keep=True)
    passes = conv.count("num_iterations", 1)
    conv.put("epochs", passes, "num_iterations")
    conv.put("rollout.sampling.max_tokens", conv.integer("max_completion_length"), "max_completion_length", keep=True)
    longest, prompt = conv.count("max_completion_length", 512), conv.integer("max_prompt_length")
    if conv.has("max_prompt_length") and prompt:
        conv.put("model.max_length", longest + prompt, "max_prompt_length", "max_completion_length")
        conv.put("data.overlong", "drop", "max_prompt_length")
        conv.note("longer prompts are dropped here; TRL cuts them on the left")
    micro = conv.count(BATCH[0], 8)
    fields.set_rows(conv, micro * (longest + (prompt or 512)), longest + 1, BATCH[0], "max_completion_length")
    return fields.divide_step(conv, total, group, size, *BATCH) * passes


def _set_advantage(conv: Conversion) -> None:
    if conv.source.program == "rloo":
        conv.put("advantage.kind", "rloo", keep=True)
        return
    scaled = (conv.text("scale_rewards") or "group").lower()
    if scaled == "batch":
        conv.refuse("scale_rewards", "rewards are divided by the group's deviation (grpo), or not (dr_grpo)")
    conv.put("advantage.kind", "dr_grpo" if scaled in ("none", "false") else "grpo", "scale_rewards", keep=True)


def _set_loss(conv: Conversion) -> None:
    grpo = conv.source.program == "grpo"
    kind = (conv.text("loss_type") or "dapo") if grpo else "grpo"
    sequence = grpo and conv.text("importance_sampling_level") == "sequence"
    if kind not in (*_AGGREGATIONS, "cispo"):
        conv.refuse("loss_type", f"the loss {kind[:20]} is not here: dapo (token-mean) takes its place")
        kind = "dapo"
    chosen = "gspo" if sequence or not grpo else "cispo" if kind == "cispo" else "ppo_clip"
    conv.put("loss.kind", chosen, "importance_sampling_level" if sequence else "loss_type", keep=True)
    conv.put("loss.aggregation", _AGGREGATIONS.get(kind, "token-mean"), "loss_type", keep=True)
    if conv.has("importance_sampling_level"):
        conv.put("loss.kind", chosen, "importance_sampling_level", keep=True)
    low, high = conv.number_or("epsilon", 0.2), conv.number("epsilon_high")
    if chosen == "cispo":
        conv.put("loss.clip_high", conv.number_or("epsilon_high", 5.0) - 1, "epsilon_high", keep=True)
        conv.drop("epsilon", "cispo has only an upper bound")
    else:
        conv.put("loss.clip_low", low, "epsilon", keep=chosen == "gspo")
        upper = "epsilon" if high is None else "epsilon_high"
        conv.put("loss.clip_high", low if high is None else high, upper, keep=True)
    if conv.has("delta") and chosen == "ppo_clip":
        conv.put("loss.dual_clip", conv.number("delta"), "delta")
    _set_kl(conv, grpo)
    conv.put("loss.old_logprobs", "trainer", default=True, keep=True)


def _set_kl(conv: Conversion, grpo: bool) -> None:
    coefficient = conv.number_or("beta", 0.0)
    conv.put("loss.kl.coefficient", coefficient, "beta")
    if not coefficient:
        conv.drop("use_bias_correction_kl", "there is no KL penalty")
    elif not grpo:
        conv.put("loss.kl.where", "reward", "beta", keep=True)
        conv.put("loss.kl.estimator", "k1", "beta", keep=True)
    elif not conv.has("use_bias_correction_kl") and conv.on("use_bias_correction_kl"):
        conv.note("the KL loss has no importance weight here; newer versions of TRL have one (use_bias_correction_kl)")


def set_trl_engine(conv: Conversion, ranks: int) -> None:
    """Sets the engine: vLLM on the trainer's GPUs or on its own, or Lockstep's."""
    conv.put("rollout.sampling.top_k", max(0, conv.integer("top_k") or 0), "top_k")
    correction = [f"vllm_importance_sampling_{each}" for each in ("correction", "mode", "clip_max", "clip_min")]
    if not conv.on("use_vllm"):
        for name in (*correction, "use_vllm", "vllm_mode", "vllm_tensor_parallel_size", "vllm_gpu_memory_utilization"):
            conv.drop(name, "use_vllm is off: Lockstep's own engine generates")
        return
    conv.put("rollout.engine.kind", "vllm", "use_vllm", keep=True)
    parallel = conv.count("vllm_tensor_parallel_size", 1)
    conv.put("rollout.engine.tensor_parallel_size", parallel, "vllm_tensor_parallel_size")
    share, mode = "vllm_gpu_memory_utilization", conv.text("vllm_mode") or "colocate"
    if mode == "colocate":
        conv.put("placement.colocate", "all", "vllm_mode")
        conv.put("rollout.engine.count", max(1, ranks // parallel), default=True, keep=True)
        conv.put("rollout.engine.gpu_memory_utilization", conv.number(share), share)
    else:
        _set_server(conv, share)
    if conv.on(correction[0]):
        _set_correction(conv, correction)


def _set_server(conv: Conversion, share: str) -> None:
    """Engines of the run in place of a server, with the server's sizes if the source starts it."""
    conv.note("the run starts its own engines in place of `trl vllm-serve`, on GPUs of their own")
    copies, width, memory = (
        stage_option(SERVER, each) for each in ("data_parallel_size", "tensor_parallel_size", "gpu_memory_utilization")
    )
    conv.put("rollout.engine.count", conv.count(copies, 1), "vllm_mode", copies, keep=True)
    if conv.has(width):
        conv.put("rollout.engine.tensor_parallel_size", conv.count(width, 1), width)
    for name in (memory, share):
        if conv.has(name):
            conv.put("rollout.engine.gpu_memory_utilization", conv.number(name), name)
            break


def _set_correction(conv: Conversion, names: list[str]) -> None:
    level, _, how = (conv.text(names[1]) or "token_truncate").rpartition("_")
    conv.put("loss.importance.kind", "mask" if how == "mask" else "truncate", names[0], names[1], keep=True)
    conv.put("loss.importance.level", "sequence" if level == "sequence" else "token", names[1], keep=True)
    conv.put("loss.importance.cap", conv.number_or(names[2], 3.0), names[2], keep=True)
    if how == "mask" and conv.has(names[3]):
        conv.put("loss.importance.floor", conv.number(names[3]), names[3])


def set_trl_rewards(conv: Conversion, *models: str) -> None:
    """Sets the reward terms: functions, and the reward models that `models` name beside TRL's common option."""
    functions, weights = conv.items("reward_funcs"), conv.numbers("reward_weights")
    if weights and len(weights) != len(functions):
        conv.refuse("reward_weights", "as many weights as functions are needed: set them in reward.terms")
        weights = []
    for index, function in enumerate(functions):
        term = _reward_term(conv, function)
        if weights:
            term["weight"] = weights[index]
        fields.add_term(conv, term, "reward_funcs", *(["reward_weights"] if weights else []))
    for model in (each for each in (*models, "reward_model_name_or_path") if conv.has(each)):
        ranks = {"ranks": conv.fields["trainer.ranks"].value} if "placement.colocate" in conv.fields else {}
        fields.add_term(conv, {"kind": "model", "path": conv.text(model), "end": "template", **ranks}, model)
    if "reward.terms" not in conv.fields:
        fields.add_term(conv, {"kind": "exact_match"})
        conv.need("reward.terms", "rewards are set in the script: name the functions in place of exact_match")


def _reward_term(conv: Conversion, name: str) -> dict[str, Any]:
    """A term for a function that a command of TRL names: one of TRL's own, or a dotted path."""
    if name == "accuracy_reward":
        return {"kind": "math", "name": name}
    if name == "think_format_reward":
        return {"kind": "regex", "pattern": _THINK_FORMAT, "name": name}
    if name == "get_soft_overlong_punishment":
        return {"kind": "length", "soft": 1024, "hard": 1280, "name": name}
    module, _, function = name.rpartition(".")
    return {"kind": "function", "path": f"{module or 'trl.rewards'}:{function}", "signature": "trl"}
