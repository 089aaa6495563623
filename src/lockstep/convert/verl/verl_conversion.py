"""Rules of verl: what its options mean together. The table `tables/verl.yaml` has all others."""

from typing import Any

from lockstep.convert import shared_fields as fields
from lockstep.convert.conversion import Conversion, typed_value
from lockstep.convert.critic_fields import PPO, set_verl_critic
from lockstep.convert.errors import NotConvertible
from lockstep.convert.source_command import SFT_PROGRAMS
from lockstep.convert.verl.verl_fields import (
    set_verl_limit,
    set_verl_model,
    set_verl_replicas,
    set_verl_steps,
    set_verl_tracking,
)
from lockstep.convert.verl.verl_rewards import place_reward_model, set_verl_rewards
from lockstep.convert.verl.verl_sft import convert_verl_sft

_ACTOR, _ROLLOUT, _MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
_ESTIMATORS = ("grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
_KL = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}


def convert_verl(conv: Conversion) -> str:
    """Sets the fields of a training of verl; returns the recipe."""
    if conv.source.program in SFT_PROGRAMS:
        return convert_verl_sft(conv)
    recipe = _set_advantage(conv)
    set_verl_model(conv, _MODEL, f"{_ACTOR}.fsdp_config.dtype")
    _set_data(conv)
    ranks = _set_placement(conv)
    updates = _set_batches(conv, ranks)
    _set_kl(conv)
    _set_loss(conv)
    _set_engine(conv, ranks)
    set_verl_rewards(conv)
    set_verl_tracking(conv, "trainer.max_actor_ckpt_to_keep")
    fields.set_every(conv, "checkpoint.every", "trainer.save_freq", keep=True)
    _set_evaluation(conv)
    if recipe == PPO:
        set_verl_critic(conv, ranks, updates)
    _offload_reference(conv, ranks)
    place_reward_model(conv)
    return recipe


def _set_advantage(conv: Conversion) -> str:
    """Sets the estimator; returns the recipe that has it."""
    name = "algorithm.adv_estimator"
    chosen = conv.text(name) or "gae"
    if chosen == "gae":
        return PPO
    if chosen not in _ESTIMATORS:
        raise NotConvertible(f"{name} {chosen[:40]} has no counterpart: use one of {', '.join(_ESTIMATORS)}")
    divided = "algorithm.norm_adv_by_std_in_grpo"
    if chosen == "grpo" and not conv.on(divided) and conv.raw(divided) is not None:
        conv.put("advantage.kind", "dr_grpo", name, divided, keep=True)
    else:
        conv.put("advantage.kind", chosen, name, keep=True)
        if chosen == "grpo":
            conv.put("advantage.epsilon", 1e-6, name, default=True)
            if conv.has(divided):
                conv.put("advantage.kind", chosen, name, divided, keep=True)
    return "grpo"


def _set_data(conv: Conversion) -> None:
    fields.set_data(conv, "data.train_files")
    conv.put("data.format", "verl", default=True)
    set_verl_limit(conv)
    if conv.on("data.filter_overlong_prompts"):
        conv.put("data.overlong", "drop", "data.filter_overlong_prompts")
        conv.drop("data.truncation", "longer prompts are dropped")
    elif (cut := conv.text("data.truncation") or "error") != "error":
        conv.put("data.overlong", "drop", "data.truncation")
        conv.refuse("data.truncation", f"prompts are never cut ({cut[:20]}): longer ones are dropped")
    else:
        conv.put("data.overlong", "error", "data.truncation")
    conv.drop("data.filter_overlong_prompts", "a longer prompt is an error, as in verl")


def _set_placement(conv: Conversion) -> int:
    nodes, per_node = conv.count("trainer.nnodes", 1), conv.count("trainer.n_gpus_per_node", 8)
    ranks = fields.set_ranks(conv, nodes, per_node, "trainer.nnodes", "trainer.n_gpus_per_node")
    own, hybrid = conv.integer(f"{_ROLLOUT}.nnodes") or 0, "actor_rollout_ref.hybrid_engine"
    if own:
        per = conv.count(f"{_ROLLOUT}.n_gpus_per_node", 8)
        conv.put("placement.rollout.nodes", own, f"{_ROLLOUT}.nnodes")
        conv.put("placement.rollout.gpus_per_node", per, f"{_ROLLOUT}.n_gpus_per_node")
    elif conv.on(hybrid):
        conv.put("placement.colocate", "all", hybrid)
    conv.drop(hybrid, "engines have GPUs of their own")
    if conv.has("trainer.device"):
        device = conv.text("trainer.device")
        conv.put("cluster.device", device if device in ("cpu", "cuda") else "auto", "trainer.device")
        if device not in ("cpu", "cuda"):
            conv.refuse("trainer.device", "devices are cpu and cuda")
    set_verl_replicas(conv, ranks, f"{_ACTOR}.fsdp_config.fsdp_size")
    _set_variables(conv)
    return ranks


def _offload_reference(conv: Conversion, ranks: int) -> None:
    """Processes for a reference that leaves the GPUs while others compute."""
    name, penalty = "actor_rollout_ref.ref.fsdp_config.param_offload", conv.fields.get("loss.kl.coefficient")
    if not conv.on(name):
        return
    if penalty is None or not penalty.value or "model.adapter.r" in conv.fields:
        conv.drop(name, "there is no reference, or it is the policy without its adapter")
    elif "placement.colocate" in conv.fields:
        conv.put("reference.ranks", ranks, name, keep=True)


def _set_variables(conv: Conversion) -> None:
    """Variables of Ray's workers, from overrides or a runtime environment; secrets are forwarded by name."""
    fields.set_cluster_variables(conv)
    marker = ".runtime_env.env_vars."
    plain: dict[str, str] = {}
    for name in [each for each in conv.given if marker in each]:
        variable = name.partition(marker)[2]
        if fields.is_secret_variable(variable, conv.text(name) or ""):
            fields.forward_variables(conv, [variable], name)
        else:
            plain[variable] = conv.text(name) or ""
            conv.put("cluster.env", dict(plain), name, keep=True)


def _set_batches(conv: Conversion, ranks: int) -> int:
    """Sets batches, steps and the schedule; returns the optimizer steps of the run."""
    prompts, group = conv.count("data.train_batch_size", 1024), conv.count(f"{_ROLLOUT}.n", 1)
    conv.put("prompts_per_step", prompts, "data.train_batch_size")
    conv.put("group_size", group, f"{_ROLLOUT}.n")
    mini = f"{_ACTOR}.ppo_mini_batch_size"
    updates = fields.divide_step(conv, prompts * group, group, conv.count(mini, 256) * group, mini)
    updates *= conv.count(f"{_ACTOR}.ppo_epochs", 1)
    _set_lengths(conv, ranks)
    steps, _ = set_verl_steps(conv, prompts, epochs=1)
    optim = f"{_ACTOR}.optim"
    warmup = [f"{optim}.lr_warmup_steps", f"{optim}.lr_warmup_steps_ratio"]
    if conv.number(warmup[0]) == 0:  # verl looks at the ratio only if it is negative
        if conv.number_or(warmup[1], 0.0) > 0:
            conv.note(f"there is no warm-up, as in verl: with {warmup[0]}=0 it ignores {warmup[1]}")
        conv.drop(warmup[0], "there is no warm-up")
        conv.drop(warmup.pop(), "lr_warmup_steps=0 switches the warm-up off")
    fields.set_schedule(
        conv, f"{optim}.lr_scheduler_type", steps * updates, warmup, f"{optim}.min_lr_ratio", "constant", updates
    )
    fields.set_lowest_rate(conv, f"{optim}.min_lr", f"{optim}.lr")
    return steps * updates


def _set_lengths(conv: Conversion, ranks: int) -> None:
    response, prompt = conv.count("data.max_response_length", 512), conv.count("data.max_prompt_length", 512)
    conv.put("rollout.sampling.max_tokens", response, "data.max_response_length", keep=True)
    conv.put("model.max_length", prompt + response, "data.max_prompt_length", "data.max_response_length")
    dynamic, micro = f"{_ACTOR}.use_dynamic_bsz", f"{_ACTOR}.ppo_micro_batch_size_per_gpu"
    if conv.on(dynamic):
        name = f"{_ACTOR}.ppo_max_token_len_per_gpu"
        fields.set_rows(conv, conv.integer(name), prompt + response, name, dynamic)
        return
    size = conv.integer(micro)
    if size is None and (over_all := conv.integer(f"{_ACTOR}.ppo_micro_batch_size")):
        micro, size = f"{_ACTOR}.ppo_micro_batch_size", max(1, over_all // ranks)
    fields.set_rows(conv, max(1, size or 1) * (prompt + response), prompt + response, micro)


def _set_kl(conv: Conversion) -> None:
    in_loss, in_reward = f"{_ACTOR}.use_kl_loss", "algorithm.use_kl_in_reward"
    names = (f"{_ACTOR}.kl_loss_coef", f"{_ACTOR}.kl_loss_type") if conv.on(in_loss) else ("", "")
    if not conv.on(in_loss) and conv.on(in_reward):
        in_loss, names = in_reward, ("algorithm.kl_ctrl.kl_coef", "algorithm.kl_penalty")
        if conv.text("algorithm.kl_ctrl.type") == "adaptive":
            conv.refuse("algorithm.kl_ctrl.type", "the coefficient of the KL penalty is fixed: choose one")
    elif conv.on(in_reward):
        conv.refuse(in_reward, "the KL is in the loss or in the reward, not in both: choose one")
    if not names[0]:
        return
    conv.put("loss.kl.coefficient", conv.number_or(names[0], 0.001), names[0], in_loss)
    conv.put("loss.kl.where", "loss" if in_loss.endswith("use_kl_loss") else "reward", in_loss, keep=True)
    estimator = conv.text(names[1]) or "kl"
    if estimator in _KL:
        conv.put("loss.kl.estimator", _KL[estimator], names[1])
    else:
        conv.refuse(names[1], f"the estimator {estimator[:20]} is not here: use kl, mse or low_var_kl")


def _set_loss(conv: Conversion) -> None:
    mode = conv.text(f"{_ACTOR}.policy_loss.loss_mode") or "vanilla"
    kind = {"vanilla": "ppo_clip", "gspo": "gspo", "cispo": "cispo"}.get(mode)
    if kind is None:
        conv.refuse(f"{_ACTOR}.policy_loss.loss_mode", f"the loss {mode[:20]} is not here: vanilla, gspo or cispo")
    conv.put("loss.kind", kind or "ppo_clip", f"{_ACTOR}.policy_loss.loss_mode", keep=True)
    both = conv.number_or(f"{_ACTOR}.clip_ratio", 0.2)
    for side in ("low", "high"):
        value = conv.number(f"{_ACTOR}.clip_ratio_{side}")
        name = f"{_ACTOR}.clip_ratio" if value is None else f"{_ACTOR}.clip_ratio_{side}"
        conv.put(f"loss.clip_{side}", both if value is None else value, name)
    conv.drop(f"{_ACTOR}.clip_ratio", "clip_ratio_low and clip_ratio_high take its place, also with their defaults")
    dual, lengths = f"{_ACTOR}.clip_ratio_c", f"{_ACTOR}.loss_scale_factor"
    if kind in ("ppo_clip", None):
        conv.put("loss.dual_clip", conv.number(dual), dual)
    conv.drop(dual, "this loss has no dual clip")
    modes = f"{_ACTOR}.loss_agg_mode"
    if kind != "gspo" or conv.has(modes):
        conv.put("loss.aggregation", conv.text(modes) or "token-mean", modes)
    if conv.has(lengths) and conv.text(modes) == "seq-mean-token-sum-norm":
        conv.put("loss.norm_length", conv.integer(lengths), lengths)
    _set_correction(conv)
    _set_staleness(conv)


def _set_staleness(conv: Conversion) -> None:
    """Asynchronous training: verl's programs for it generate the next step while one is trained."""
    program = conv.source.program
    if "one_step_off" in program or "fully_async" in program:
        conv.put("rollout.max_staleness", 1, default=True, keep=True)
        if "loss.importance.kind" not in conv.fields:
            conv.put("loss.old_logprobs", "engine", default=True, keep=True)


def _set_correction(conv: Conversion) -> None:
    at = "algorithm.rollout_correction"
    bypass = conv.on(f"{at}.bypass_mode")
    conv.put("loss.old_logprobs", "engine" if bypass else "trainer", f"{at}.bypass_mode", keep=True)
    weights, rejects = conv.text(f"{at}.rollout_is"), conv.text(f"{at}.rollout_rs")
    chosen, name = (rejects, "rollout_rs") if rejects else (weights, "rollout_is")
    if chosen is None:
        return
    if rejects and weights:
        conv.refuse(f"{at}.rollout_is", "tokens are masked or weights truncated, not both: choose one")
    if chosen not in ("token", "sequence") or bypass:
        conv.refuse(f"{at}.{name}", "use token or sequence" if not bypass else "a ratio to the engine's needs none")
        return
    conv.put("loss.importance.kind", "mask" if rejects else "truncate", f"{at}.{name}", keep=True)
    conv.put("loss.importance.level", chosen, f"{at}.{name}", keep=True)
    bound = f"{at}.{name}_threshold"
    conv.put("loss.importance.cap", conv.number_or(bound, conv.number_or(f"{at}.rollout_is_threshold", 2.0)), bound)


def _set_engine(conv: Conversion, ranks: int) -> None:
    top_k = conv.integer(f"{_ROLLOUT}.top_k")
    conv.put("rollout.sampling.top_k", max(0, top_k or 0), f"{_ROLLOUT}.top_k")
    name = conv.text(f"{_ROLLOUT}.name") or "vllm"
    if name not in ("vllm", "hf"):
        conv.note(f"vLLM takes the place of {name[:20]}: engines differ in speed, not in what is learned")
    if name == "hf":
        conv.put("rollout.engine.kind", "builtin", f"{_ROLLOUT}.name", keep=True)
        return
    conv.put("rollout.engine.kind", "vllm", f"{_ROLLOUT}.name", keep=True)
    parallel = conv.count(f"{_ROLLOUT}.tensor_model_parallel_size", 2)
    conv.put("rollout.engine.tensor_parallel_size", parallel, f"{_ROLLOUT}.tensor_model_parallel_size")
    own = conv.integer(f"{_ROLLOUT}.nnodes") or 0
    gpus = own * conv.count(f"{_ROLLOUT}.n_gpus_per_node", 8) if own else ranks
    conv.put("rollout.engine.count", max(1, gpus // parallel), "trainer.n_gpus_per_node", keep=True)
    conv.drop(f"{_ROLLOUT}.data_parallel_size", "engines are counted: GPUs divided by tensor_parallel_size")
    conv.put(
        "rollout.engine.gpu_memory_utilization",
        conv.number(f"{_ROLLOUT}.gpu_memory_utilization"),
        f"{_ROLLOUT}.gpu_memory_utilization",
    )
    for option in ("enforce_eager", "enable_prefix_caching"):
        if conv.raw(f"{_ROLLOUT}.{option}") is not None:
            conv.put(f"rollout.engine.{option}", conv.on(f"{_ROLLOUT}.{option}"), f"{_ROLLOUT}.{option}")
    if conv.has(f"{_ROLLOUT}.max_num_seqs"):
        conv.put("rollout.engine.max_num_seqs", conv.integer(f"{_ROLLOUT}.max_num_seqs"), f"{_ROLLOUT}.max_num_seqs")
    if conv.has(f"{_ROLLOUT}.dtype"):
        conv.put("rollout.engine.dtype", conv.text(f"{_ROLLOUT}.dtype"), f"{_ROLLOUT}.dtype")
    _set_engine_arguments(conv)


def _set_engine_arguments(conv: Conversion) -> None:
    """Options that vLLM gets unchanged."""
    prefix = f"{_ROLLOUT}.engine_kwargs.vllm."
    extra: dict[str, Any] = {}
    used: list[str] = []
    for name in conv.given:
        plain = name.removeprefix(prefix) if name.startswith(prefix) else name.removeprefix(f"{_ROLLOUT}.")
        passed = plain in ("max_num_batched_tokens", "enable_chunked_prefill", "quantization")
        if not name.startswith(prefix) and not (passed and name.startswith(_ROLLOUT)):
            continue
        if conv.raw(name) is not None and conv.passes_on(name):
            extra[plain], used = typed_value(conv.raw(name), None), [*used, name]
    if extra:
        conv.put("rollout.engine.extra", extra, *used, keep=True)


def _set_evaluation(conv: Conversion) -> None:
    at = f"{_ROLLOUT}.val_kwargs"
    if not conv.has("data.val_files"):
        for name in ("trainer.test_freq", "data.val_max_samples", f"{at}.temperature", f"{at}.top_p"):
            conv.drop(name, "no data for evaluation is given")
        return
    files = conv.items("data.val_files")
    conv.put("evaluation.data.path", files[0], "data.val_files")
    conv.put("evaluation.data.format", "verl", default=True)
    conv.put("evaluation.data.overlong", "drop", default=True)
    if len(files) > 1:
        conv.refuse("data.val_files", "an evaluation has one dataset: put the files into one folder, and name it")
    fields.set_every(conv, "evaluation.every", "trainer.test_freq")
    limit = conv.integer("data.val_max_samples") or -1
    if limit > 0:
        conv.put("evaluation.prompts", limit, "data.val_max_samples")
    samples = conv.on(f"{at}.do_sample")
    temperature = conv.number_or(f"{at}.temperature", 0.0)
    names = (f"{at}.temperature", f"{at}.do_sample")
    conv.put("evaluation.sampling.temperature", temperature if samples else 0.0, *names, keep=True)
    conv.put("evaluation.sampling.top_p", conv.number_or(f"{at}.top_p", 1.0), f"{at}.top_p")
    conv.put("evaluation.sampling.top_k", max(0, conv.integer(f"{at}.top_k") or 0), f"{at}.top_k")
    tokens = conv.fields["rollout.sampling.max_tokens"].value
    conv.put("evaluation.sampling.max_tokens", tokens, "data.max_response_length", keep=True)
