"""OpenRLHF's command lines."""

from pathlib import Path

from lockstep.doctor.configs import memory, models, spelling, timeouts
from lockstep.doctor.configs.advice import Advice
from lockstep.doctor.configs.arguments import add
from lockstep.doctor.configs.lengths import judge_heads
from lockstep.doctor.configs.openrlhf_rules import BATCH, RULES, longest_sequence
from lockstep.doctor.configs.openrlhf_run import Run
from lockstep.doctor.configs.programs import Job
from lockstep.doctor.configs.settings import Settings
from lockstep.doctor.configs.tables import Table, programs, table

RAY_ENVIRONMENT = "https://docs.ray.io/en/latest/ray-core/handling-dependencies.html"
_REACHES_WORKERS = (
    "NCCL_",
    "TORCH_",
    "VLLM_",
    "CUDA_",
    "GLOO_",
    "HF_",
    "PYTORCH_",
    "UCX_",
    "FI_",
    "OMP_",
    "RAY_",
    "DEEPSPEED_",
    "DS_",
)

"""Today's names -> those of 0.9 and before."""


def judge(advice: Advice, job: Job, folder: Path, gpu_gib: float | None, installed: str | None) -> None:
    """All that is known of this program's options."""
    if job.program not in programs("openrlhf"):
        advice.unchecked("program-unknown", f"{job.program}: there is no list of its options here", at=job.place)
        return
    options = table("openrlhf", job.program)
    raw = Settings()
    add(raw, job.words, options.options, hyphens=False)
    version = options.version_for([setting.name for setting in raw], installed)
    known = options.at(version)
    settings = Settings(defaults={name: option.default for name, option in known.items()})
    for word in add(settings, job.words, known, hyphens=False):
        if word.known and word.text not in ("-h",):
            advice.error(
                "option-unknown",
                f"'{word.text}' belongs to no option",
                "argparse refuses it; is a backslash or a quote missing before it?",
                "",
                at=word.place,
            )
    _version(advice, options, settings, version, installed, job)
    spelling.judge(advice, options, settings, version, spelling.Spelling())
    if job.program == "openrlhf.cli.train_ppo_ray":
        run = Run(settings, version, nested="actor.num_nodes" in known)
        for rule in RULES:
            rule(advice, run, job)
        _memory(advice, run, job, folder, gpu_gib)
    else:
        _supervised(advice, settings, job, folder, gpu_gib)
    variables = {**job.shell, **job.workers}
    timeouts.openrlhf(advice, variables)
    _environment(advice, job)


def _version(advice: Advice, options: Table, settings: Settings, version: str, installed: str | None, job: Job) -> None:
    how = f"{installed} is installed" if installed else "the version that knows most of its options"
    newest = options.versions[-1]
    old = [setting.name for setting in settings if setting.name not in options.at(newest)]
    if version != newest and old:
        advice.warn(
            "version-old",
            f"this command line is of OpenRLHF {version} or near it ({how}): {newest} refuses {len(old)} of its"
            " options",
            "Names became nested after 0.10.0: --actor.num_nodes for --actor_num_nodes.",
            f"pip install 'openrlhf=={version}', or the new names below",
            options.source,
            job.place,
        )
    else:
        advice.say("version", "ok", f"options judged by OpenRLHF {version} ({how})", at=job.place)


# ---------------------------------------------------------------- where models are placed


# ---------------------------------------------------------------- batches


# ---------------------------------------------------------------- algorithm


# ---------------------------------------------------------------- engines and lengths


# ---------------------------------------------------------------- memory


def _memory(advice: Advice, run: Run, job: Job, folder: Path, gpu_gib: float | None) -> None:
    shape = models.find(run.text("actor.model_name_or_path"), folder)
    if shape is None:
        advice.unchecked(
            "memory-model",
            "memory: the model's size is not known here",
            "give a folder with its config.json, or a name that tells its size",
            run.at("actor.model_name_or_path", job=job),
        )
        return
    parallel = run.whole("vllm.tensor_parallel_size") or 1
    judge_heads(
        advice, shape, parallel, run.shown("vllm.tensor_parallel_size"), run.at("vllm.tensor_parallel_size", job=job)
    )
    longest, micro = longest_sequence(run), run.whole("train.micro_batch_size")
    tokens = (
        run.whole("train.max_tokens_per_gpu")
        if run.on("train.dynamic_batch_enable")
        else micro * longest
        if micro and longest
        else None
    )
    training = memory.Training(
        shape,
        run.gpus("actor"),
        run.whole("ds.zero_stage") or 0,
        run.on("ds.adam_offload"),
        trainable=0.02 if run.whole("ds.lora.rank") else 1.0,
    )
    utilization = run.settings.number(run.name("vllm.gpu_memory_utilization"))
    engine = None
    if run.whole("vllm.num_engines") and utilization and 0 < utilization <= 1:
        shares = run.on("train.colocate_all") and not run.on("train.async_enable")
        engine = memory.Engine(
            shape,
            parallel,
            utilization,
            shares,
            run.on("vllm.enable_sleep"),
            longest,
            run.at("vllm.gpu_memory_utilization", "vllm.num_engines", job=job),
            run.shown("vllm.gpu_memory_utilization"),
        )
    memory.judge(
        advice,
        training,
        engine,
        memory.Batch(tokens if shape.layers else None, run.on("ds.use_liger_kernel")),
        gpu_gib,
        run.at("actor.model_name_or_path", job=job),
        offloaded_while_generating=run.on("ds.enable_sleep"),
        what="the actor's training",
    )


def _supervised(advice: Advice, settings: Settings, job: Job, folder: Path, gpu_gib: float | None) -> None:
    """train_sft, train_dpo, train_rm."""
    world = job.launcher.world
    names = {
        "batch": ("train.batch_size", "train_batch_size"),
        "micro": ("train.micro_batch_size", "micro_train_batch_size"),
    }
    batch, micro = (
        next((settings.whole(name) for name in pair if settings.whole(name)), None) for pair in names.values()
    )
    if world and batch and micro and batch % (micro * world):
        advice.error(
            "batch-accumulation",
            f"a batch of {batch} is no multiple of micro-batch {micro} x {world} ranks",
            "DeepSpeed asserts train batch = micro batch x accumulation x ranks.",
            f"a multiple of {micro * world}",
            BATCH,
            settings.place(*names["batch"], *names["micro"]),
        )
    name = (
        settings.text("model.model_name_or_path")
        or settings.text("pretrain")
        or settings.text("actor.model_name_or_path")
    )
    shape = models.find(name, folder)
    if shape is not None and world:
        stage = (
            settings.whole("ds.zero_stage") if "ds.zero_stage" in settings.defaults else settings.whole("zero_stage")
        )
        offload = settings.flag("ds.adam_offload") or settings.flag("adam_offload")
        training = memory.Training(shape, world, stage or 0, bool(offload))
        memory.judge(advice, training, None, memory.Batch(None), gpu_gib, job.place)


def _environment(advice: Advice, job: Job) -> None:
    """Variables that the submitting shell exports do not reach a Ray cluster's workers."""
    if not job.through_ray:
        return
    lost = [
        name
        for name in job.shell
        if name.startswith(_REACHES_WORKERS)
        and name not in job.workers
        and name not in ("RAY_ADDRESS", "CUDA_VISIBLE_DEVICES", "CUDA_HOME", *timeouts.UNREAD)
    ]
    if lost:
        listed = ", ".join(
            f'"{name}": "{job.shell[name].text if job.shell[name].known else "..."}"' for name in sorted(lost)
        )
        advice.warn(
            "environment-driver-only",
            f"{', '.join(sorted(lost))}: set in the shell that submits the job, which Ray's workers do not see",
            "ray job submit starts the driver on the cluster; workers get the raylets' environment and runtime_env.",
            f"--runtime-env-json='{{\"env_vars\": {{{listed}}}}}'",
            RAY_ENVIRONMENT,
            job.shell[lost[0]].place,
        )
