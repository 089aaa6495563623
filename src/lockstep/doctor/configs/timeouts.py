"""Which communicators a time-out reaches, and which it does not."""

from lockstep.doctor.configs.advice import Advice
from lockstep.doctor.configs.settings import NOWHERE, Place, Settings
from lockstep.doctor.configs.shell import Word

TORCH = "https://github.com/pytorch/pytorch/blob/v2.11.0/torch/distributed/distributed_c10d.py"
NCCL = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html"
DEEPSPEED = "https://github.com/deepspeedai/DeepSpeed/blob/v0.19.8/deepspeed/constants.py"
OPENRLHF = "https://github.com/OpenRLHF/OpenRLHF/blob/v0.11.2/openrlhf/utils/deepspeed/deepspeed.py"
VERL = "https://github.com/verl-project/verl/blob/v0.9.1/verl/utils/distributed.py"
VERL_READS = "https://github.com/verl-project/verl/blob/v0.6.1/verl/workers/fsdp_workers.py"
TRANSFORMERS = "https://github.com/huggingface/transformers/blob/v5.23.0/src/transformers/training_args.py"
SUBGROUPS = (
    "Groups that are made later (device meshes, ZeRO's and tensor-parallel groups) ask PyTorch for a time-out of their"
    " own and get its default, 10 minutes for NCCL; the channel to vLLM has none of these."
)
DEFAULT_S = 600
"""Of PyTorch for NCCL, and of `nccl_timeout`: whoever left it there asked for nothing else."""
UNREAD = {
    "NCCL_TIMEOUT": "neither NCCL nor PyTorch reads it",
    "TORCH_NCCL_TIMEOUT": "PyTorch reads no such variable",
    "TORCH_DISTRIBUTED_TIMEOUT": "PyTorch reads no such variable",
    "DIST_TIMEOUT": "neither NCCL nor PyTorch reads it",
    "NCCL_COMM_TIMEOUT": "neither NCCL nor PyTorch reads it",
}
"""Variables that posts recommend as time-outs."""


def judge_environment(advice: Advice, variables: dict[str, Word], settable: str) -> None:
    """`variables`: what the job is started with. `settable`: the setting that reaches a communicator here."""
    for name, why in UNREAD.items():
        if name in variables:
            advice.warn(
                "timeout-unread",
                f"{name}={_shown(variables[name])}: {why}; no communicator gets this time-out",
                SUBGROUPS,
                settable,
                NCCL,
                variables[name].place,
            )
    word = variables.get("NCCL_BLOCKING_WAIT") or variables.get("TORCH_NCCL_BLOCKING_WAIT")
    if word is not None and word.text not in ("0", ""):
        advice.warn(
            "timeout-blocking-wait",
            "blocking wait is on: the CPU waits for each collective",
            "It slows every collective down, and its time-out is the communicator's own all the same.",
            "remove it",
            TORCH,
            word.place,
        )


def _shown(word: Word) -> str:
    return word.text if word.known else "..."


def openrlhf(advice: Advice, variables: dict[str, Word]) -> None:
    """Its time-out is written in its source."""
    judge_environment(
        advice,
        variables,
        "in OpenRLHF it is the timeout of setup_distributed in utils/deepspeed/deepspeed.py: 60 minutes, no option"
        " sets it",
    )
    if "DEEPSPEED_TIMEOUT" in variables:
        advice.warn(
            "timeout-unread",
            f"DEEPSPEED_TIMEOUT={_shown(variables['DEEPSPEED_TIMEOUT'])} is overruled: OpenRLHF hands DeepSpeed 60"
            " minutes",
            SUBGROUPS,
            "change setup_distributed in utils/deepspeed/deepspeed.py",
            OPENRLHF,
            variables["DEEPSPEED_TIMEOUT"].place,
        )


def verl(advice: Advice, settings: Settings, variables: dict[str, Word], version: str, engine: str) -> None:
    """`nccl_timeout` and who reads it."""
    name = "actor_rollout_ref.nccl_timeout"
    numbers = tuple(int(part) for part in version.split(".")[:2])
    unread = numbers >= (0, 8)
    fix = (
        "no option does: change initialize_global_process_group_ray in verl/utils/distributed.py"
        if unread
        else f"{name}=SECONDS"
    )
    judge_environment(advice, variables, fix)
    if name not in settings or settings.whole(name) == DEFAULT_S:
        return
    seen, at = f"{name}={settings.get(name)}", settings.place(name)
    if unread:
        advice.warn(
            "timeout-unread",
            f"{seen} reaches no communicator: the workers of verl {version} start theirs without a time-out, which is"
            " PyTorch's 10 minutes",
            SUBGROUPS,
            fix,
            VERL,
            at,
        )
    elif numbers < (0, 6) and engine != "megatron":
        advice.warn(
            "timeout-unread",
            f"{seen}: in verl {version} only Megatron's workers read it",
            SUBGROUPS,
            "a newer verl",
            VERL_READS,
            at,
        )
    else:
        advice.note(
            "timeout-default-group",
            f"{seen} reaches the default group of the workers only",
            SUBGROUPS,
            source=VERL_READS,
            at=at,
        )


def transformers(
    advice: Advice, settings: Settings, variables: dict[str, Word], deepspeed: bool, longest_s: float | None = None
) -> None:
    """`ddp_timeout` and `DEEPSPEED_TIMEOUT`."""
    judge_environment(advice, variables, "ddp_timeout: SECONDS")
    seconds = settings.number("ddp_timeout")
    if "ddp_timeout" in settings and seconds is not None:
        at = settings.place("ddp_timeout")
        advice.note(
            "timeout-default-group",
            f"ddp_timeout={seconds:g} s reaches the default group only"
            + (" (through deepspeed.init_distributed)" if deepspeed else ""),
            SUBGROUPS,
            source=TRANSFORMERS,
            at=at,
        )
        if 0 < seconds < 60:
            advice.warn(
                "timeout-short",
                f"ddp_timeout={seconds:g} is in seconds: less than a checkpoint or the first batch takes",
                "The slowest legal stage between two collectives must fit.",
                "ddp_timeout: 1800 or more",
                TRANSFORMERS,
                at,
            )
        if settings.flag("use_cpu"):
            advice.warn("timeout-unread", "ddp_timeout is dropped with use_cpu", "", "", TRANSFORMERS, at)
    if "DEEPSPEED_TIMEOUT" in variables and "ddp_timeout" in settings:
        advice.note(
            "timeout-default-group",
            "DEEPSPEED_TIMEOUT (in minutes) is overruled by ddp_timeout",
            "",
            source=DEEPSPEED,
            at=variables["DEEPSPEED_TIMEOUT"].place,
        )


def place_of(settings: Settings, name: str) -> Place:
    """Where it is set, if it is."""
    return settings.place(name) if name in settings else NOWHERE
