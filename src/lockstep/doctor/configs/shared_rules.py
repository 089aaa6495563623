"""Rules that all frameworks share: timeouts and the communicators that they apply to, environment variables, attention
heads and sequence lengths."""

import re
from collections.abc import Mapping

from lockstep.doctor.configs.config_settings import NO_LOCATION, ConfigFindings, ConfigLocation, ConfigSettings
from lockstep.doctor.configs.model_memory import ModelSize
from lockstep.doctor.configs.shell_scripts import ShellWord
from lockstep.doctor.environment.environment_lint import ProcessEnvironment, lint_environments

VLLM_CONFIG_SOURCE = "https://github.com/vllm-project/vllm/blob/v0.20.0/vllm/config/model.py"


def judge_heads(
    advice: ConfigFindings,
    shape: ModelSize,
    parallel: int,
    option: str,
    at: ConfigLocation,
    source: str = VLLM_CONFIG_SOURCE,
) -> None:
    """Reports a tensor-parallel size that does not divide the number of attention heads."""
    if shape.heads and parallel > 1 and shape.heads % parallel:
        divisors = [size for size in (1, 2, 4, 8, 16) if shape.heads % size == 0]
        advice.error(
            "parallel-heads",
            f"{option} {parallel}: this does not divide the {shape.heads} attention heads of {shape.name}",
            "vLLM refuses to start.",
            f"use one of {', '.join(map(str, divisors))}",
            source,
            at,
        )


def judge_positions(
    advice: ConfigFindings, shape: ModelSize, longest: int | None, what: str, at: ConfigLocation
) -> None:
    """Reports sequences that are longer than the model's maximum number of positions."""
    if shape.max_positions and longest and longest > shape.max_positions:
        advice.error(
            "length-model",
            f"{what} of {longest} tokens, but {shape.name} has only {shape.max_positions} positions",
            "vLLM refuses a maximum length above the model's.",
            f"use at most {shape.max_positions}",
            VLLM_CONFIG_SOURCE,
            at,
        )


TORCH_SOURCE = "https://github.com/pytorch/pytorch/blob/v2.11.0/torch/distributed/distributed_c10d.py"
NCCL_ENV_SOURCE = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html"
DEEPSPEED_TIMEOUT_SOURCE = "https://github.com/deepspeedai/DeepSpeed/blob/v0.19.8/deepspeed/constants.py"
OPENRLHF_TIMEOUT_SOURCE = "https://github.com/OpenRLHF/OpenRLHF/blob/v0.11.2/openrlhf/utils/deepspeed/deepspeed.py"
VERL_TIMEOUT_SOURCE = "https://github.com/verl-project/verl/blob/v0.9.1/verl/utils/distributed.py"
VERL_READS_SOURCE = "https://github.com/verl-project/verl/blob/v0.6.1/verl/workers/fsdp_workers.py"
TRANSFORMERS_SOURCE = "https://github.com/huggingface/transformers/blob/v5.23.0/src/transformers/training_args.py"
SUBGROUPS = (
    "Groups created later (device meshes, ZeRO's and tensor-parallel groups) get PyTorch's default timeout, 10 minutes"
    " for NCCL; the channel to vLLM has no timeout at all."
)
DEFAULT_TIMEOUT_S = 600
"""Default of PyTorch for NCCL and of verl's `nccl_timeout`: a setting with this value changes nothing."""
UNREAD_VARIABLES = {
    "NCCL_TIMEOUT": "neither NCCL nor PyTorch reads it",
    "TORCH_NCCL_TIMEOUT": "PyTorch does not read it",
    "TORCH_DISTRIBUTED_TIMEOUT": "PyTorch does not read it",
    "DIST_TIMEOUT": "neither NCCL nor PyTorch reads it",
    "NCCL_COMM_TIMEOUT": "neither NCCL nor PyTorch reads it",
}
"""Variables that web pages recommend for setting a timeout, although nothing reads them."""


def judge_timeout_variables(advice: ConfigFindings, variables: dict[str, ShellWord], fix: str) -> None:
    """Reports variables that are set to change a timeout but do not.

    Args:
        variables: the variables of the job.
        fix: the setting that does change a timeout.
    """
    for name, why in UNREAD_VARIABLES.items():
        if name in variables:
            advice.warn(
                "timeout-unread",
                f"{name}={_word_text(variables[name])}: {why}; it changes no communicator's timeout",
                SUBGROUPS,
                fix,
                NCCL_ENV_SOURCE,
                variables[name].location,
            )
    word = variables.get("NCCL_BLOCKING_WAIT") or variables.get("TORCH_NCCL_BLOCKING_WAIT")
    if word is not None and word.text not in ("0", ""):
        advice.warn(
            "timeout-blocking-wait",
            "blocking wait is on: the CPU waits for the end of each collective",
            "It slows down every collective, and does not change the communicator's timeout.",
            "remove it",
            TORCH_SOURCE,
            word.location,
        )


def _word_text(word: ShellWord) -> str:
    return word.text if word.known else "..."


def judge_openrlhf_timeout(advice: ConfigFindings, variables: dict[str, ShellWord]) -> None:
    """Reports variables that do not change OpenRLHF's timeout, which is hard-coded."""
    judge_timeout_variables(
        advice,
        variables,
        "no option does: OpenRLHF uses 60 minutes, set in setup_distributed of utils/deepspeed/deepspeed.py",
    )
    if "DEEPSPEED_TIMEOUT" in variables:
        advice.warn(
            "timeout-unread",
            f"DEEPSPEED_TIMEOUT={_word_text(variables['DEEPSPEED_TIMEOUT'])} is overridden: OpenRLHF sets DeepSpeed's"
            " timeout to 60 minutes",
            SUBGROUPS,
            "change setup_distributed in utils/deepspeed/deepspeed.py",
            OPENRLHF_TIMEOUT_SOURCE,
            variables["DEEPSPEED_TIMEOUT"].location,
        )


def judge_verl_timeout(
    advice: ConfigFindings, settings: ConfigSettings, variables: dict[str, ShellWord], version: str, engine: str
) -> None:
    """Reports which communicators `nccl_timeout` applies to."""
    name = "actor_rollout_ref.nccl_timeout"
    numbers = tuple(int(part) for part in version.split(".")[:2])
    unread = numbers >= (0, 8)
    fix = (
        "no option does: change initialize_global_process_group_ray in verl/utils/distributed.py"
        if unread
        else f"{name}=SECONDS"
    )
    judge_timeout_variables(advice, variables, fix)
    if name not in settings or settings.integer(name) == DEFAULT_TIMEOUT_S:
        return
    seen, at = f"{name}={settings.get(name)}", settings.location_of(name)
    if unread:
        advice.warn(
            "timeout-unread",
            f"{seen} applies to no communicator: the workers of verl {version} create theirs with PyTorch's default"
            " timeout of 10 minutes",
            SUBGROUPS,
            fix,
            VERL_TIMEOUT_SOURCE,
            at,
        )
    elif numbers < (0, 6) and engine != "megatron":
        advice.warn(
            "timeout-unread",
            f"{seen}: in verl {version} only Megatron's workers read it",
            SUBGROUPS,
            "use a newer verl",
            VERL_READS_SOURCE,
            at,
        )
    else:
        advice.note(
            "timeout-default-group",
            f"{seen} applies only to the default group of the workers",
            SUBGROUPS,
            source=VERL_READS_SOURCE,
            at=at,
        )


def judge_transformers_timeout(
    advice: ConfigFindings,
    settings: ConfigSettings,
    variables: dict[str, ShellWord],
    uses_deepspeed: bool,
) -> None:
    """Reports which communicators `ddp_timeout` and `DEEPSPEED_TIMEOUT` apply to."""
    judge_timeout_variables(advice, variables, "ddp_timeout: SECONDS")
    seconds = settings.number("ddp_timeout")
    if "ddp_timeout" in settings and seconds is not None:
        at = settings.location_of("ddp_timeout")
        advice.note(
            "timeout-default-group",
            f"ddp_timeout={seconds:g} s applies only to the default group"
            + (" (through deepspeed.init_distributed)" if uses_deepspeed else ""),
            SUBGROUPS,
            source=TRANSFORMERS_SOURCE,
            at=at,
        )
        if 0 < seconds < 60:
            advice.warn(
                "timeout-short",
                f"ddp_timeout={seconds:g} is in seconds; a checkpoint or the first batch may take longer",
                "The timeout must be longer than the slowest stage between two collectives.",
                "ddp_timeout: 1800 or more",
                TRANSFORMERS_SOURCE,
                at,
            )
        if settings.flag("use_cpu"):
            advice.warn("timeout-unread", "ddp_timeout is ignored with use_cpu", "", "", TRANSFORMERS_SOURCE, at)
    if "DEEPSPEED_TIMEOUT" in variables and "ddp_timeout" in settings:
        advice.note(
            "timeout-default-group",
            "ddp_timeout overrides DEEPSPEED_TIMEOUT (which is in minutes)",
            "",
            source=DEEPSPEED_TIMEOUT_SOURCE,
            at=variables["DEEPSPEED_TIMEOUT"].location,
        )


RAY_ENVIRONMENT_SOURCE = "https://docs.ray.io/en/latest/ray-core/handling-dependencies.html"


def judge_script_variables(advice: ConfigFindings, variables: Mapping[str, ShellWord]) -> None:
    """Reports the environment lint's errors and warnings, with the lines that set the variables.

    Variables that the timeout rules judge are left out.
    """
    given = {name: word.text for name, word in variables.items() if word.known and name not in UNREAD_VARIABLES}
    for found in lint_environments([ProcessEnvironment("", given)]) if given else []:
        if found.severity in ("error", "warning"):
            named = next((name for name in re.findall(r"\w+", found.seen) if name in given), None)
            at = variables[named].location if named is not None else NO_LOCATION
            advice.add(found.id, found.severity, found.seen, found.why, found.fix, found.source, at)
