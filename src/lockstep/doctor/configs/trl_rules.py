"""Rules for TRL's trainers: groups of completions, generation, the Trainer, and agreement with DeepSpeed's file."""

from pathlib import Path

from lockstep.doctor.configs import shared_rules
from lockstep.doctor.configs.config_settings import ConfigFindings, ConfigSettings
from lockstep.doctor.configs.deepspeed_rules import FILL_SOURCE
from lockstep.doctor.configs.option_tables import option_table
from lockstep.doctor.configs.trl_settings import (
    ONLINE,
    TRLConfig,
    judge_option_names,
    judge_trl_memory,
    vllm_mode,
    zero_stage,
)

GRPO_SOURCE = "https://github.com/huggingface/trl/blob/v1.16.0/trl/trainer/grpo_config.py"


ENGINE_SOURCE = "https://github.com/huggingface/trl/blob/v1.16.0/trl/generation/vllm_generation.py"


TRAINER_SOURCE = "https://github.com/huggingface/transformers/blob/v5.23.0/src/transformers/training_args.py"


def judge_groups(advice: ConfigFindings, run: TRLConfig) -> None:
    s = run.settings
    group, each = s.whole("num_generations"), s.whole("per_device_train_batch_size")
    accumulation = s.whole("gradient_accumulation_steps") or 1
    whole, steps = s.whole("generation_batch_size"), s.whole("steps_per_generation")
    at = run.place("num_generations", "per_device_train_batch_size", "generation_batch_size")
    if group is not None and group < 2:
        advice.error(
            "algorithm-group",
            f"num_generations {group}",
            "Completions of one prompt are compared; TRL requires at least 2.",
            "num_generations: 8",
            GRPO_SOURCE,
            at,
        )
        return
    if whole is not None and steps is not None and "steps_per_generation" in s and "generation_batch_size" in s:
        advice.error(
            "batch-generation",
            "generation_batch_size and steps_per_generation are both set",
            "TRL refuses it.",
            "keep one",
            GRPO_SOURCE,
            run.place("generation_batch_size"),
        )
        return
    if whole is None and each and run.world:
        whole = each * run.world * ((steps or accumulation) if "generation_batch_size" in s.defaults else 1)
    elif whole is not None and each and run.world and whole % (each * run.world):
        advice.error(
            "batch-generation",
            f"generation_batch_size {whole} is not a multiple of per_device_train_batch_size {each} x {run.world}"
            " processes",
            "TRL refuses it.",
            f"a multiple of {each * run.world}",
            GRPO_SOURCE,
            run.place("generation_batch_size"),
        )
    if whole is not None and group and whole % group:
        advice.error(
            "batch-groups",
            f"{whole} completions of a generation are not a multiple of num_generations {group}",
            "TRL refuses it: groups must be whole. A generation is per_device_train_batch_size x processes x"
            " steps_per_generation (gradient_accumulation_steps without it).",
            f"num_generations that divides {whole}",
            GRPO_SOURCE,
            at,
        )
    elif whole is None and group:
        advice.unchecked(
            "batch-groups",
            f"cannot tell whether num_generations {group} divides the generation batch: the number of processes is "
            "not known",
            "also give accelerate's YAML or the launch command",
            at,
        )
    _around_groups(advice, run, group)


def _around_groups(advice: ConfigFindings, run: TRLConfig, group: int | None) -> None:
    """Judges evaluation, and options that cannot be combined with groups."""
    s = run.settings
    evaluates = s.text("eval_strategy") not in (None, "no", "False", "None")
    per_eval, of_eval = s.whole("per_device_eval_batch_size"), s.whole("num_generations_eval") or group
    if evaluates and per_eval and run.world and of_eval and per_eval * run.world % of_eval:
        advice.error(
            "batch-groups",
            f"per_device_eval_batch_size {per_eval} x {run.world} processes is not a multiple of {of_eval} generations",
            "TRL refuses it.",
            "per_device_eval_batch_size so that it is",
            GRPO_SOURCE,
            run.place("per_device_eval_batch_size", "eval_strategy"),
        )
    if s.flag("auto_find_batch_size"):
        advice.error(
            "batch-groups",
            "auto_find_batch_size with groups of completions",
            "TRL refuses it: halving a batch would split groups.",
            "auto_find_batch_size: false",
            GRPO_SOURCE,
            run.place("auto_find_batch_size"),
        )
    if s.flag("sync_ref_model") and s.number("beta") == 0:
        advice.error(
            "algorithm-kl",
            "sync_ref_model with beta 0",
            "Then there is no reference model; TRL refuses it.",
            "beta: 0.04, or sync_ref_model: false",
            GRPO_SOURCE,
            run.place("sync_ref_model"),
        )


def judge_engine(advice: ConfigFindings, run: TRLConfig) -> None:
    s = run.settings
    if not s.flag("use_vllm"):
        _without_engine(advice, run)
        return
    mode = vllm_mode(run)
    parallel = s.whole("vllm_tensor_parallel_size") or 1
    if mode == "colocate":
        if run.world and run.world % parallel:
            advice.error(
                "parallel-engine",
                f"vllm_tensor_parallel_size {parallel} does not divide {run.world} processes",
                "TRL refuses it.",
                "a divisor",
                ENGINE_SOURCE,
                run.place("vllm_tensor_parallel_size"),
            )
        elsewhere = [each.name for each in s if each.name.startswith("vllm_server_")]
        if elsewhere:
            advice.warn(
                "engine-mode",
                f"{', '.join(elsewhere)} with vllm_mode colocate are not read"
                + ("" if "vllm_mode" in s else " (colocate is the default since TRL 1.0)"),
                "",
                "vllm_mode: server",
                GRPO_SOURCE,
                run.place(*elsewhere),
            )
    elif mode == "server":
        _engine_server(advice, run)
    if s.flag("ds3_gather_for_generation") is False:
        advice.note(
            "zero3-generation",
            "ds3_gather_for_generation is not used with vLLM",
            at=run.place("ds3_gather_for_generation"),
        )
    _engine_lengths(advice, run)


def _without_engine(advice: ConfigFindings, run: TRLConfig) -> None:
    """Judges generation by transformers."""
    s = run.settings
    unused = [each.name for each in s if each.name.startswith("vllm_")]
    if unused and s.get("use_vllm") is not None and "use_vllm" not in s:
        advice.warn(
            "engine-unused",
            f"{', '.join(unused)} without use_vllm: transformers generates",
            "It is several times slower.",
            "use_vllm: true",
            GRPO_SOURCE,
            run.place(*unused),
        )
    if zero_stage(run) == 3:
        advice.warn(
            "zero3-generation",
            "ZeRO-3 generates without vLLM: weights are gathered on every GPU, or layer by layer for each token",
            "It is slow, needs the whole model on each GPU (ds3_gather_for_generation), and ranks that finish early"
            " must keep taking part.",
            "use_vllm: true",
            GRPO_SOURCE,
            run.place("use_vllm"),
        )


def _engine_server(advice: ConfigFindings, run: TRLConfig) -> None:
    """Judges an engine in a separate server."""
    s = run.settings
    here = [
        name
        for name in (
            "vllm_gpu_memory_utilization",
            "vllm_tensor_parallel_size",
            "vllm_max_model_length",
            "vllm_enable_sleep_mode",
        )
        if name in s
    ]
    if here:
        advice.warn(
            "engine-mode",
            f"{', '.join(here)} with vllm_mode server are not read",
            "The server has its own options.",
            "trl vllm-serve --gpu_memory_utilization ... --tensor_parallel_size ...",
            GRPO_SOURCE,
            run.place(*here),
        )
    host = s.text("vllm_server_host")
    machines = run.accelerate.whole("num_machines") if run.accelerate is not None else None
    if (
        (machines or 1) > 1
        and host in ("0.0.0.0", "localhost", "127.0.0.1", None)
        and not s.set("vllm_server_base_url")
    ):
        advice.warn(
            "engine-address",
            f"vllm_server_host is {host or '0.0.0.0, its default'} with {machines} machines",
            "Only rank 0 calls the server: it must be on rank 0's machine, and so must its channel for weights.",
            "vllm_server_host: the server's address",
            GRPO_SOURCE,
            run.place("vllm_server_host"),
        )


def _engine_lengths(advice: ConfigFindings, run: TRLConfig) -> None:
    s = run.settings
    prompt, completion = s.whole("max_prompt_length"), s.whole("max_completion_length")
    longest = s.whole("vllm_max_model_length") or s.whole("vllm_max_model_len")
    if longest and completion and completion + (prompt or 1) > longest:
        advice.error(
            "length-engine",
            f"vllm_max_model_length {longest} is less than a prompt{f' of {prompt}' if prompt else ''} with"
            f" max_completion_length {completion}",
            "vLLM refuses such prompts, or completions are truncated.",
            f"vllm_max_model_length: {completion + (prompt or 1024)}",
            GRPO_SOURCE,
            run.place("vllm_max_model_length", "max_completion_length"),
        )


def judge_trainer(advice: ConfigFindings, run: TRLConfig) -> None:
    s = run.settings
    if s.flag("fp16") and s.flag("bf16"):
        advice.error(
            "trainer-precision",
            "fp16 and bf16 are both on",
            "The Trainer refuses it.",
            "bf16: true only",
            TRAINER_SOURCE,
            run.place("fp16"),
        )
    _uneven_batches(advice, run)
    if s.flag("load_best_model_at_end") and s.text("save_strategy") != "best":
        evaluated, saved = (
            s.text("eval_strategy") or s.text("evaluation_strategy") or "no",
            s.text("save_strategy") or "steps",
        )
        if evaluated != saved:
            advice.error(
                "trainer-best",
                f"load_best_model_at_end with eval_strategy {evaluated} and save_strategy {saved}",
                "They must be the same.",
                f"eval_strategy: {saved}",
                TRAINER_SOURCE,
                run.place("load_best_model_at_end"),
            )
        elif saved == "steps":
            save, every = s.whole("save_steps"), s.whole("eval_steps") or s.whole("logging_steps")
            if save and every and save % every:
                advice.error(
                    "trainer-best",
                    f"save_steps {save} is not a multiple of eval_steps {every} with load_best_model_at_end",
                    "The Trainer refuses it.",
                    f"save_steps: {every * max(1, save // every)}",
                    TRAINER_SOURCE,
                    run.place("save_steps"),
                )
    if (
        run.program == "sft"
        and s.flag("packing")
        and (s.text("attn_implementation") or "flash") in ("eager", "sdpa")
        and s.text("packing_strategy") != "wrapped"
    ):
        advice.warn(
            "trainer-packing",
            f"packing with attn_implementation {s.text('attn_implementation')}",
            "Samples in a packed row attend to each other.",
            "attn_implementation: flash_attention_2",
            "https://github.com/huggingface/trl/blob/v1.16.0/trl/trainer/sft_trainer.py",
            run.place("packing"),
        )


def _uneven_batches(advice: ConfigFindings, run: TRLConfig) -> None:
    """Judges whether ranks get different numbers of batches."""
    s = run.settings
    config = s.get("accelerator_config")
    even = config.get("even_batches") if isinstance(config, dict) else None
    if even is False and not s.flag("dataloader_drop_last"):
        advice.warn(
            "batch-uneven",
            "accelerator_config.even_batches is false without dataloader_drop_last",
            "The last batches are distributed unevenly: ranks that run out do not join the others' collectives.",
            "dataloader_drop_last: true, or even_batches: true",
            TRAINER_SOURCE,
            run.place("accelerator_config"),
        )


def judge_deepspeed_match(advice: ConfigFindings, run: TRLConfig, json: ConfigSettings) -> None:
    """Values in the DeepSpeed file must equal the Trainer's, or be "auto"."""
    s = run.settings
    each, accumulation = s.whole("per_device_train_batch_size"), s.whole("gradient_accumulation_steps")
    whole = each * accumulation * run.world if each and accumulation and run.world else None
    pairs: list[tuple[str, str, float | None]] = [
        ("train_micro_batch_size_per_gpu", "per_device_train_batch_size", each),
        ("gradient_accumulation_steps", "gradient_accumulation_steps", accumulation),
        ("train_batch_size", "per_device_train_batch_size x gradient_accumulation_steps x processes", whole),
        ("gradient_clipping", "max_grad_norm", s.number("max_grad_norm")),
        ("optimizer.params.lr", "learning_rate", s.number("learning_rate")),
        ("optimizer.params.weight_decay", "weight_decay", s.number("weight_decay")),
        ("scheduler.params.warmup_max_lr", "learning_rate", s.number("learning_rate")),
    ]
    for theirs, ours, trainers in pairs:
        value = json.number(theirs)
        if theirs in json and value is not None and trainers is not None and value != trainers:
            default = "" if ours in s or " x " in ours else " (its default)"
            advice.error(
                "deepspeed-mismatch",
                f"{theirs} is {value:g}, the Trainer's {ours} is {trainers:g}{default}",
                "The Trainer refuses different values.",
                f'"{theirs.rpartition(".")[2]}": "auto"',
                FILL_SOURCE,
                json.place(theirs),
            )
    for kind in ("fp16", "bf16"):
        enabled = json.get(f"{kind}.enabled")
        if enabled in (True, False) and kind in s and s.flag(kind) is not None and s.flag(kind) != enabled:
            advice.error(
                "deepspeed-mismatch",
                f"{kind}.enabled is {enabled}, {kind} is {s.flag(kind)}",
                "The Trainer refuses different values.",
                '"enabled": "auto"',
                FILL_SOURCE,
                json.place(f"{kind}.enabled"),
            )


def judge_accelerate_match(advice: ConfigFindings, run: TRLConfig, accelerate: ConfigSettings) -> None:
    name = "deepspeed_config.gradient_accumulation_steps"
    value, trainers = accelerate.whole(name), run.settings.whole("gradient_accumulation_steps")
    if value and trainers and value != trainers:
        advice.warn(
            "deepspeed-mismatch",
            f"gradient_accumulation_steps is {value} here and {trainers} for the Trainer",
            "The Trainer's value determines its steps, the other one DeepSpeed's.",
            f"gradient_accumulation_steps: {trainers}",
            FILL_SOURCE,
            accelerate.place(name),
        )


def judge_trl(
    advice: ConfigFindings, run: TRLConfig, folder: Path, gpu_gib: float | None, installed: dict[str, str]
) -> None:
    """Judges the options of a TRL training."""
    names = [setting.name for setting in run.settings]
    trl = option_table("trl", run.program or "sft", "script")
    trainer = option_table("transformers", "TrainingArguments")
    run.version = trl.version_for(names, installed.get("trl"))
    trainer_version = trainer.version_for(names, installed.get("transformers"))
    known = {**trainer.at(trainer_version), **(trl.at(run.version) if run.program else {})}
    run.settings.defaults = {name: option.default for name, option in known.items()}
    judge_option_names(advice, run, trl, trainer, trainer_version, installed)
    how = "installed" if installed.get("trl") else "the versions with most of its options"
    what = f"TRL {run.version} and " if run.program else ""
    advice.add("version", "ok", f"options judged by {what}transformers {trainer_version} ({how})", at=run.at)
    if run.program in ONLINE:
        judge_groups(advice, run)
        judge_engine(advice, run)
    judge_trainer(advice, run)
    if run.deepspeed is not None:
        judge_deepspeed_match(advice, run, run.deepspeed)
    elif run.accelerate is not None:
        judge_accelerate_match(advice, run, run.accelerate)
    kinds = _uses_deepspeed(run)
    shared_rules.judge_transformers_timeout(advice, run.settings, run.variables, kinds)
    judge_trl_memory(advice, run, folder, gpu_gib)


def _uses_deepspeed(run: TRLConfig) -> bool:
    """Whether it runs on DeepSpeed."""
    return run.deepspeed is not None or (
        run.accelerate is not None and run.accelerate.text("distributed_type") == "DEEPSPEED"
    )
