"""Commands beside a training that are converted with it: OpenRLHF's `batch_inference`, of which one generates
completions, one scores them and chooses among them, and the training learns from the chosen ones, round by round; and
TRL's server that generates for a training."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from lockstep.convert.errors import NotConvertible
from lockstep.doctor.configs.config_settings import ConfigSetting, ConfigSettings
from lockstep.doctor.configs.option_tables import OptionSpec, option_table
from lockstep.doctor.configs.training_commands import TrainingCommand, add_arguments

INFERENCE = "openrlhf.cli.batch_inference"
"""OpenRLHF's program that generates completions, or scores them with a reward model, and writes a file."""
SERVER = "vllm-serve"
"""TRL's command for a server that generates for a training."""
GENERATE, SCORE = "generate", "score"
STAGES = (GENERATE, SCORE, SERVER)
_CHOICES = ("iter_dpo", "rs")


def stage_option(stage: str, name: str) -> str:
    """The name of an option of a stage, among those of the training."""
    return f"{stage}:{name}"


def split_stage(name: str) -> tuple[str, str]:
    """The stage of an option, "" for the training itself, and the option's name there."""
    stage, _, plain = name.partition(":")
    return (stage, plain) if stage in STAGES else ("", name)


def chooses_completions(commands: Sequence[TrainingCommand]) -> bool:
    """Whether one of the commands chooses among scored completions. Raises NotConvertible if it does what no recipe
    does."""
    choices = [each.text("post_processor") for each in map(_arguments, commands)]
    if "csft" in choices:
        raise NotConvertible(
            "--post_processor csft: conditional SFT, which writes rewards into prompts, has no recipe here: recipe "
            "rejection_sampling learns the best completions"
        )
    return any(each in _CHOICES for each in choices)


def inference_settings(commands: Sequence[TrainingCommand]) -> Iterator[ConfigSetting]:
    """The settings of generating and scoring. Raises NotConvertible unless there is one command for each."""
    stages: dict[str, TrainingCommand] = {}
    for command in commands:
        task = _arguments(command).text("eval_task") or ""
        stage = SCORE if task == "rm" else GENERATE
        if stage in stages:
            lines = f"lines {stages[stage].location.line} and {command.location.line}"
            raise NotConvertible(f"batch_inference {stage}s twice ({lines}): keep one of the two")
        stages[stage] = command
    if absent := {GENERATE, SCORE} - stages.keys():
        raise NotConvertible(f"no batch_inference beside the training {' and '.join(sorted(absent))}s completions")
    for stage, command in stages.items():
        yield from _settings_of(stage, _arguments(command))


def inference_options() -> dict[str, OptionSpec]:
    """The options of generating and scoring."""
    known = option_table("openrlhf", INFERENCE).options
    return _options_of(GENERATE, known) | _options_of(SCORE, known)


def server_settings(command: TrainingCommand) -> Iterator[ConfigSetting]:
    """The settings of a server."""
    settings = ConfigSettings()
    add_arguments(settings, command.words, option_table("trl", SERVER).options)
    return _settings_of(SERVER, settings)


def server_options() -> dict[str, OptionSpec]:
    """The options of a server."""
    return _options_of(SERVER, option_table("trl", SERVER).options)


def _settings_of(stage: str, settings: Iterable[ConfigSetting]) -> Iterator[ConfigSetting]:
    return (replace(each, name=stage_option(stage, each.name)) for each in settings)


def _options_of(stage: str, options: Mapping[str, OptionSpec]) -> dict[str, OptionSpec]:
    return {stage_option(stage, name): option for name, option in options.items()}


def _arguments(command: TrainingCommand) -> ConfigSettings:
    settings = ConfigSettings()
    add_arguments(settings, command.words, option_table("openrlhf", INFERENCE).options, hyphens=False)
    return settings
