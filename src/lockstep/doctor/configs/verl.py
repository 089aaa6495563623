"""verl: Hydra overrides of main_ppo in a script, or its YAML."""

from pathlib import Path
from typing import Any

from lockstep.doctor.configs import memory, models, spelling, timeouts
from lockstep.doctor.configs.advice import Advice
from lockstep.doctor.configs.arguments import add_overrides
from lockstep.doctor.configs.files import Document, leaves
from lockstep.doctor.configs.lengths import judge_heads, judge_positions
from lockstep.doctor.configs.programs import Job
from lockstep.doctor.configs.settings import Place, Setting, Settings
from lockstep.doctor.configs.shell import Word
from lockstep.doctor.configs.tables import table
from lockstep.doctor.configs.verl_rules import RULES, VALIDATION, longest_sequence
from lockstep.doctor.configs.verl_run import A, R, Run

ULYSSES = "https://github.com/verl-project/verl/blob/v0.9.1/verl/models/transformers/monkey_patch.py"
PROGRAM = "verl.trainer.main_ppo"


def of_job(advice: Advice, job: Job, folder: Path, gpu_gib: float | None, installed: str | None) -> None:
    """Overrides of a command line."""
    raw = Settings()
    loose = add_overrides(raw, job.words)
    config = next((word.text for word in loose if word.text.startswith("--config-name")), "")
    for index, word in enumerate(loose):
        ours = (
            word.text.startswith("-")
            or not word.known
            or (
                index
                and loose[index - 1].text in ("--config-name", "--config-path", "--config-dir", "-cn", "-cp", "-cd")
            )
        )
        if not ours:
            advice.error(
                "option-unknown",
                f"'{word.text}' is no override",
                "Hydra takes key=value; is a backslash missing before it?",
                "",
                at=word.place,
            )
    other = "--config-path" in {word.text.partition("=")[0] for word in loose} or (config and "ppo" not in config)
    _judge(
        advice,
        raw,
        job.program,
        config,
        job.place,
        {**job.shell, **job.workers},
        folder,
        gpu_gib,
        installed,
        bool(other),
    )
    _environment(advice, job, raw)


def of_document(advice: Advice, document: Document, folder: Path, gpu_gib: float | None, installed: str | None) -> None:
    """A YAML file."""
    raw = Settings()
    for name, value in leaves(document.tree or {}):
        if name.split(".")[0] in ("defaults", "hydra") or name.endswith("_target_"):
            continue
        raw.add(Setting(name, value, document.places.get(name, Place(document.file, 0))))
    own_defaults = "defaults" in (document.tree or {})
    _judge(advice, raw, PROGRAM, "", Place(document.file, 0), {}, folder, gpu_gib, installed, own_defaults)


def _judge(
    advice: Advice,
    raw: Settings,
    program: str,
    config: str,
    at: Place,
    variables: dict[str, Word],
    folder: Path,
    gpu_gib: float | None,
    installed: str | None,
    other: bool,
) -> None:
    if program != PROGRAM and "main_ppo" not in program:
        advice.unchecked(
            "program-unknown",
            f"{program}: there is no list of its options here; only what main_ppo has too was looked at",
            at=at,
        )
        other = True
    options = table("verl", PROGRAM)
    names = [setting.name for setting in raw if not setting.forced]
    version = options.version_for(names, installed)
    known = options.at(version)
    engine = _engine(raw, config)
    defaults = {name: option.default for name, option in known.items()}
    run = Run(Settings(raw.given, defaults), version, engine, at)
    groups = [setting for setting in raw if "@" not in setting.name and setting.name not in ("model_engine",)]
    spelling.judge(
        advice,
        options,
        groups,
        version,
        spelling.Spelling("", "Hydra ends with: key is not in struct.", not installed, not other),
        strict=not other,
    )
    _only(advice, run, known)
    how = f"{installed} is installed" if installed else "the version that knows most of its options"
    advice.say("version", "ok", f"options judged by verl {version} ({how})", at=at)
    for rule in RULES:
        rule(advice, run)
    _memory(advice, run, folder, gpu_gib)
    timeouts.verl(advice, run.settings, variables, version, engine)


def _engine(raw: Settings, config: str) -> str:
    for name in ("megatron", "veomni", "torchtitan"):
        chosen = raw.text("model_engine") == name or raw.text(f"{A}.strategy") == name
        if chosen or name in config:
            return name
    return "dp"


def _only(advice: Advice, run: Run, known: dict[str, Any]) -> None:
    """Options that only another model engine's config has."""
    for setting in run.settings:
        option = known.get(setting.name)
        if option is not None and option.only and run.engine not in option.only and not setting.forced:
            where = " or ".join(option.only)
            say = advice.error if run.engine == "dp" and f"{A}.strategy" not in run.settings else advice.warn
            say(
                "option-other-engine",
                f"{setting.name} is in the config of {where} only",
                "Hydra ends with: key is not in struct.",
                f"model_engine={option.only[0]} or --config-name=ppo_{option.only[0]}_trainer",
                VALIDATION,
                setting.place,
            )


# ---------------------------------------------------------------- batches


# ---------------------------------------------------------------- algorithm


# ---------------------------------------------------------------- parallel sizes, lengths


# ---------------------------------------------------------------- memory


def _memory(advice: Advice, run: Run, folder: Path, gpu_gib: float | None) -> None:
    path = "actor_rollout_ref.model.path"
    shape = models.find(run.text(path) if path in run.settings else None, folder)
    if shape is None:
        advice.unchecked(
            "memory-model",
            "memory: the model's size is not known here",
            "give a folder with its config.json, or a name that tells its size",
            run.at(path),
        )
        return
    tensor = run.whole(f"{R}.tensor_model_parallel_size") or 1
    judge_heads(advice, shape, tensor, f"{R}.tensor_model_parallel_size", run.at(f"{R}.tensor_model_parallel_size"))
    ulysses = run.whole(f"{A}.ulysses_sequence_parallel_size") or 1
    judge_heads(
        advice,
        shape,
        ulysses,
        f"{A}.ulysses_sequence_parallel_size",
        run.at(f"{A}.ulysses_sequence_parallel_size"),
        ULYSSES,
    )
    longest = longest_sequence(run)
    judge_positions(
        advice,
        shape,
        run.whole(f"{R}.max_model_len") or longest,
        "sequences",
        run.at(f"{R}.max_model_len", "data.max_response_length"),
    )
    engine = _engine_share(advice, run, shape, longest)
    offloaded = run.on(f"{A}.fsdp_config.param_offload") and run.on(f"{A}.fsdp_config.optimizer_offload")
    fused = run.on("actor_rollout_ref.model.use_fused_kernels")
    batch = memory.Batch(_micro_batch_tokens(run, longest) if shape.layers else None, fused)
    what = "the actor's training"
    memory.judge(advice, _training(run, shape), engine, batch, gpu_gib, run.at(path), offloaded, what)


def _engine_share(advice: Advice, run: Run, shape: models.Shape, longest: int | None) -> memory.Engine | None:
    name = f"{R}.gpu_memory_utilization"
    share = run.number(name)
    if share is not None and not 0 < share <= 1:
        seen = f"{name}={share:g} is no share of a GPU"
        advice.error("engine-memory", seen, "", "a number between 0 and 1", memory.UTILIZATION, run.at(name))
        return None
    if not share or run.text(f"{R}.name") == "hf":
        return None
    tensor = run.whole(f"{R}.tensor_model_parallel_size") or 1
    shared = (run.whole(f"{R}.nnodes") or 0) == 0
    sleeps = run.settings.flag(f"{R}.free_cache_engine") is not False
    at = run.at(name, f"{R}.tensor_model_parallel_size")
    return memory.Engine(shape, tensor, share, shared, sleeps, longest, at, name)


def _micro_batch_tokens(run: Run, longest: int | None) -> int | None:
    if run.on(f"{A}.use_dynamic_bsz"):
        return run.whole(f"{A}.ppo_max_token_len_per_gpu")
    micro = run.whole(f"{A}.ppo_micro_batch_size_per_gpu")
    return micro * longest if micro and longest else None


def _training(run: Run, shape: models.Shape) -> memory.Training | None:
    """FSDP keeps master weights, gradients and Adam's states in `model_dtype`, float32 unless told otherwise."""
    if run.engine != "dp":
        return None
    size = run.whole(f"{A}.fsdp_config.fsdp_size") or -1
    wide = 4 if (run.text(f"{A}.fsdp_config.model_dtype") or "fp32") in ("fp32", "float32") else 2
    on_cpu = run.on(f"{A}.fsdp_config.offload_policy")
    trainable = 0.02 if (run.whole("actor_rollout_ref.model.lora_rank") or 0) > 0 else 1.0
    ranks = size if size > 0 else run.gpus
    return memory.Training(shape, ranks, 3, on_cpu, on_cpu, trainable, wide, wide, 2 * wide)


def _environment(advice: Advice, job: Job, raw: Settings) -> None:
    """Exports reach the driver; a Ray cluster's other nodes have their own environment."""
    from lockstep.doctor.configs.openrlhf import RAY_ENVIRONMENT

    given = {setting.name.rpartition(".")[2] for setting in raw if ".runtime_env.env_vars." in setting.name} | set(
        job.workers
    )
    nodes = raw.whole("trainer.nnodes")
    lost = sorted(
        name
        for name in job.shell
        if name.startswith(("NCCL_", "TORCH_", "VLLM_", "GLOO_", "UCX_", "FI_")) and name not in given
    )
    if lost and (job.through_ray or (nodes or 1) > 1):
        place = "+ray_kwargs.ray_init.runtime_env.env_vars"
        advice.warn(
            "environment-driver-only",
            f"{', '.join(lost)}: set in the shell that starts the driver, which workers on other nodes do not see",
            "They get the environment in which their node's raylet was started.",
            " ".join(f"{place}.{name}='{job.shell[name].text if job.shell[name].known else '...'}'" for name in lost),
            RAY_ENVIRONMENT,
            job.shell[lost[0]].place,
        )
