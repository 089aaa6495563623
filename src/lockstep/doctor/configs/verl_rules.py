"""Rules of verl's main_ppo: batches, algorithm, parallel sizes, lengths."""

from lockstep.doctor.configs.advice import Advice
from lockstep.doctor.configs.verl_run import A, F, R, Run

VALIDATION = "https://github.com/verl-project/verl/blob/v0.9.1/verl/utils/config.py"


ACTOR = "https://github.com/verl-project/verl/blob/v0.9.1/verl/workers/config/actor.py"


ROLLOUT = "https://github.com/verl-project/verl/blob/v0.9.1/verl/workers/config/rollout.py"


WORKERS = "https://github.com/verl-project/verl/blob/v0.9.1/verl/workers/engine_workers.py"


BALANCING = "https://github.com/verl-project/verl/blob/v0.9.1/verl/utils/seqlen_balancing.py"


SERVER = "https://github.com/verl-project/verl/blob/v0.9.1/verl/workers/rollout/vllm_rollout/vllm_async_server.py"


ADVANTAGE = "https://github.com/verl-project/verl/blob/v0.9.1/verl/trainer/ppo/core_algos.py"


GROUPED = (
    "grpo",
    "rloo",
    "grpo_passk",
    "reinforce_plus_plus_baseline",
    "opo",
    "gpg",
    "rloo_vectorized",
    "grpo_vectorized",
)


def _model_parallel(run: Run) -> int:
    """Ranks that see the same samples."""
    if run.engine == "megatron":
        sizes = [
            run.whole(f"{A}.megatron.{each}_parallel_size") or 1
            for each in ("tensor_model", "pipeline_model", "context")
        ]
        return sizes[0] * sizes[1] * sizes[2]
    return max(
        run.whole(f"{A}.ulysses_sequence_parallel_size") or 1,
        run.whole(f"{A}.fsdp_config.ulysses_sequence_parallel_size") or 1,
    )


def _batches(advice: Advice, run: Run) -> None:
    gpus, train, samples = run.gpus, run.whole("data.train_batch_size"), run.whole(f"{R}.n") or 1
    mini, dynamic = run.whole(f"{A}.ppo_mini_batch_size"), run.on(f"{A}.use_dynamic_bsz")
    same = _model_parallel(run)
    if gpus and gpus % same:
        advice.error(
            "parallel-sizes",
            f"{gpus} GPUs are no multiple of the {same} that share samples (sequence, tensor, pipeline and context"
            " parallel)",
            "The device mesh cannot be made.",
            "sizes whose product divides the GPUs",
            VALIDATION,
            run.at(
                f"{A}.ulysses_sequence_parallel_size",
                f"{A}.megatron.tensor_model_parallel_size",
                "trainer.n_gpus_per_node",
            ),
        )
        return
    ranks = gpus // same if gpus else None
    if train and gpus and not dynamic:
        least = (
            ranks * (run.whole(f"{A}.ppo_micro_batch_size_per_gpu") or 1)
            if run.engine == "megatron" and ranks
            else gpus
        )
        if train * samples % least:
            advice.error(
                "batch-ranks",
                f"{train} prompts x {samples} samples = {train * samples} are no multiple of {least}, the smallest"
                f" batch of {gpus} GPUs",
                "verl asserts it before it starts.",
                f"data.train_batch_size so that times {samples} it is a multiple of {least}",
                VALIDATION,
                run.at("data.train_batch_size", f"{R}.n", "trainer.n_gpus_per_node"),
            )
    if train and mini and train < mini and not dynamic:
        advice.error(
            "batch-mini",
            f"data.train_batch_size {train} is less than ppo_mini_batch_size {mini}",
            "verl refuses it.",
            f"{A}.ppo_mini_batch_size={train} or less",
            ACTOR,
            run.at(f"{A}.ppo_mini_batch_size", "data.train_batch_size"),
        )
    elif train and mini and train % mini:
        advice.warn(
            "batch-mini",
            f"data.train_batch_size {train} is no multiple of ppo_mini_batch_size {mini}",
            "The last optimizer step of each batch is smaller than the others, is filled up, or fails.",
            f"{A}.ppo_mini_batch_size that divides {train}",
            ACTOR,
            run.at(f"{A}.ppo_mini_batch_size", "data.train_batch_size"),
        )
    _mini_batches(advice, run, ranks)


def _mini_batches(advice: Advice, run: Run, ranks: int | None) -> None:
    """What each rank gets of a mini-batch."""
    mini, samples = run.whole(f"{A}.ppo_mini_batch_size"), run.whole(f"{R}.n") or 1
    dynamic = run.on(f"{A}.use_dynamic_bsz")
    if mini and ranks and mini * samples % ranks:
        advice.error(
            "batch-mini-ranks",
            f"ppo_mini_batch_size {mini} x {samples} samples = {mini * samples} do not divide over {ranks}"
            " data-parallel ranks",
            "Workers assert that each rank gets as much.",
            f"{A}.ppo_mini_batch_size so that times {samples} it is a multiple of {ranks}",
            WORKERS,
            run.at(f"{A}.ppo_mini_batch_size", f"{R}.n"),
        )
        return
    micro = run.whole(f"{A}.ppo_micro_batch_size_per_gpu")
    if mini and ranks and micro and not dynamic and mini * samples // ranks % micro:
        advice.error(
            "batch-micro",
            f"each rank's {mini * samples // ranks} samples of a mini-batch are no multiple of"
            f" ppo_micro_batch_size_per_gpu {micro}",
            "Workers assert it.",
            f"{A}.ppo_micro_batch_size_per_gpu that divides {mini * samples // ranks}",
            WORKERS,
            run.at(f"{A}.ppo_micro_batch_size_per_gpu", f"{A}.ppo_mini_batch_size"),
        )


def _micro_batches(advice: Advice, run: Run) -> None:
    if run.on(f"{A}.use_dynamic_bsz"):
        _token_budget(advice, run)
        return
    groups = [(A, "ppo_micro_batch_size"), (R, "log_prob_micro_batch_size")]
    if run.on(f"{A}.use_kl_loss") or run.on("algorithm.use_kl_in_reward"):
        groups.append((F, "log_prob_micro_batch_size"))
    for group, name in groups:
        old, new = f"{group}.{name}", f"{group}.{name}_per_gpu"
        given = [each for each in (old, new) if run.set(each)]
        if len(given) == 2:
            advice.error(
                "batch-micro-both",
                f"{name} and {name}_per_gpu are both set in {group}",
                "verl refuses it; the first one is deprecated.",
                f"drop {old}",
                VALIDATION,
                run.at(old),
            )
        elif not given:
            advice.error(
                "batch-micro-missing",
                f"neither {name} nor {name}_per_gpu is set in {group}",
                "verl refuses it unless use_dynamic_bsz is on.",
                f"{new}=1 and upwards",
                VALIDATION,
                run.at_start,
            )
        elif given == [old]:
            advice.warn(
                "batch-micro-old",
                f"{old} is deprecated: it counts over all GPUs",
                "",
                f"{new}",
                VALIDATION,
                run.at(old),
            )


def _token_budget(advice: Advice, run: Run) -> None:
    longest, same = longest_sequence(run), _model_parallel(run) if run.engine == "dp" else 1
    for name in (
        f"{A}.ppo_max_token_len_per_gpu",
        f"{R}.log_prob_max_token_len_per_gpu",
        f"{F}.log_prob_max_token_len_per_gpu",
    ):
        budget = run.whole(name)
        if budget and longest and budget * same < longest and (name in run.settings or name.startswith(A)):
            advice.error(
                "length-budget",
                f"{name} {budget} x sequence parallel {same} is less than prompt + response = {longest} tokens",
                "verl asserts that the longest sequence fits into a micro-batch.",
                f"{name}={-(-longest // same)} or more",
                BALANCING,
                run.at(name, "data.max_response_length"),
            )


def _algorithm(advice: Advice, run: Run) -> None:
    estimator = run.text("algorithm.adv_estimator") or "gae"
    samples = run.whole(f"{R}.n")
    if estimator in GROUPED and samples == 1:
        advice.warn(
            "algorithm-group",
            f"algorithm.adv_estimator={estimator} with {R}.n=1",
            "It compares samples of one prompt; of a single one the reward itself is the advantage, without a"
            " baseline.",
            f"{R}.n=8",
            ADVANTAGE,
            run.at(f"{R}.n", "algorithm.adv_estimator"),
        )
    if estimator == "gae" and "critic.model.path" not in run.settings and run.settings.given:
        how = "is gae" if "algorithm.adv_estimator" in run.settings else "is not set, which is gae"
        advice.warn(
            "algorithm-critic",
            f"algorithm.adv_estimator {how}, and critic.model.path is not set: {run.get('critic.model.path')} is"
            " loaded",
            "",
            "critic.model.path=..., or algorithm.adv_estimator=grpo",
            VALIDATION,
            run.at("algorithm.adv_estimator"),
        )
    if run.on("algorithm.use_kl_in_reward") and run.on(f"{A}.use_kl_loss"):
        advice.warn(
            "algorithm-kl",
            "KL is in the reward and in the loss",
            "verl takes both.",
            f"{A}.use_kl_loss=False or algorithm.use_kl_in_reward=False",
            VALIDATION,
            run.at(f"{A}.use_kl_loss"),
        )
    _rollout(advice, run)


def _rollout(advice: Advice, run: Run) -> None:
    numbers = tuple(int(part) for part in run.version.split(".")[:2])
    if run.text(f"{R}.mode") == "sync" and numbers >= (0, 7):
        advice.error(
            "rollout-mode",
            f"{R}.mode=sync was removed",
            "verl refuses it.",
            f"{R}.mode=async",
            ROLLOUT,
            run.at(f"{R}.mode"),
        )
    if numbers >= (0, 7) and f"{R}.name" not in run.settings:
        advice.error(
            "rollout-name",
            f"{R}.name has no default in verl {run.version}",
            "Hydra ends with: missing mandatory value.",
            f"{R}.name=vllm",
            ROLLOUT,
            run.at_start,
        )
    if run.on(f"{R}.val_kwargs.do_sample") and run.number(f"{R}.temperature") == 0:
        advice.error(
            "rollout-sampling",
            f"{R}.val_kwargs.do_sample with temperature 0",
            "It is asserted.",
            f"{R}.temperature=1.0",
            VALIDATION,
            run.at(f"{R}.temperature"),
        )


def _parallel(advice: Advice, run: Run) -> None:
    tensor, data, pipeline = (
        run.whole(f"{R}.{each}_parallel_size") or 1 for each in ("tensor_model", "data", "pipeline_model")
    )
    gpus, engine = run.gpus, tensor * data * pipeline
    standalone = (run.whole(f"{R}.nnodes") or 0) > 0
    if gpus and gpus % engine and not standalone:
        advice.error(
            "parallel-engine",
            f"{gpus} GPUs are no multiple of the engine's tensor {tensor} x data {data} x pipeline {pipeline}"
            + ("" if f"{R}.tensor_model_parallel_size" in run.settings else " (2 is verl's default)"),
            "Workers assert it.",
            f"{R}.tensor_model_parallel_size that divides {gpus}",
            WORKERS,
            run.at(f"{R}.tensor_model_parallel_size", "trainer.n_gpus_per_node"),
        )
    if pipeline > 1:
        advice.error(
            "parallel-engine",
            f"{R}.pipeline_model_parallel_size={pipeline}: engines of verl do not do it",
            "It raises NotImplementedError.",
            f"{R}.pipeline_model_parallel_size=1",
            ROLLOUT,
            run.at(f"{R}.pipeline_model_parallel_size"),
        )
    expert = run.whole(f"{R}.expert_parallel_size") or 1
    if expert > 1 and expert != tensor * data and run.text(f"{R}.name") != "trtllm":
        advice.error(
            "parallel-engine",
            f"{R}.expert_parallel_size {expert} is not tensor {tensor} x data {data}",
            "It is asserted.",
            f"{R}.expert_parallel_size={tensor * data}",
            ROLLOUT,
            run.at(f"{R}.expert_parallel_size"),
        )
    ulysses = f"{A}.ulysses_sequence_parallel_size"
    if (run.whole(ulysses) or 1) > 1 and not run.on("actor_rollout_ref.model.use_remove_padding"):
        advice.error(
            "parallel-ulysses",
            f"{ulysses}={run.whole(ulysses)} without actor_rollout_ref.model.use_remove_padding",
            "verl refuses it.",
            "actor_rollout_ref.model.use_remove_padding=True",
            ACTOR,
            run.at(ulysses),
        )
    size = run.whole(f"{A}.fsdp_config.fsdp_size")
    if gpus and size and size > 0 and gpus % size:
        advice.error(
            "parallel-sizes",
            f"{A}.fsdp_config.fsdp_size={size} does not divide {gpus} GPUs",
            "The device mesh cannot be made.",
            "a divisor, or -1",
            WORKERS,
            run.at(f"{A}.fsdp_config.fsdp_size"),
        )


def longest_sequence(run: Run) -> int | None:
    prompt, response = run.whole("data.max_prompt_length"), run.whole("data.max_response_length")
    return prompt + response if prompt and response else None


def _lengths(advice: Advice, run: Run) -> None:
    longest, model = longest_sequence(run), run.whole(f"{R}.max_model_len")
    if longest and model and model < longest:
        advice.warn(
            "length-engine",
            f"{R}.max_model_len {model} is less than prompt {run.whole('data.max_prompt_length')} + response"
            f" {run.whole('data.max_response_length')} = {longest}",
            "Responses end early, or prompts are refused, without a word of the reward's side.",
            f"{R}.max_model_len={longest}",
            SERVER,
            run.at(f"{R}.max_model_len"),
        )
    batched = run.whole(f"{R}.max_num_batched_tokens")
    chunked = run.settings.flag(f"{R}.enable_chunked_prefill")
    needed = model or longest
    if chunked is False and batched and needed and batched < needed:
        advice.error(
            "length-prefill",
            f"{R}.max_num_batched_tokens {batched} is less than {needed}, and chunked prefill is off",
            "verl refuses it: a prompt must fit into one batch.",
            f"{R}.enable_chunked_prefill=True or {R}.max_num_batched_tokens={needed}",
            SERVER,
            run.at(f"{R}.max_num_batched_tokens", f"{R}.enable_chunked_prefill"),
        )


RULES = (_batches, _micro_batches, _algorithm, _parallel, _lengths)
