"""Reads what a script, a command line or a YAML file of another framework trains, and executes nothing."""

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from lockstep.base.secrets import redact_text
from lockstep.convert.errors import NotConvertible
from lockstep.convert.inference_stages import (
    INFERENCE,
    SERVER,
    chooses_completions,
    inference_options,
    inference_settings,
    server_options,
    server_settings,
)
from lockstep.convert.refused_programs import check_convertible
from lockstep.convert.vlm_r1.vlm_r1_options import vlm_r1_options
from lockstep.doctor.configs.config_files import ConfigDocument, leaves, parse_config, read_config
from lockstep.doctor.configs.config_settings import (
    UNKNOWN_VALUE,
    ConfigLocation,
    ConfigSetting,
    ConfigSettings,
)
from lockstep.doctor.configs.option_tables import OptionSpec, option_programs, option_table
from lockstep.doctor.configs.shell_scripts import ShellWord
from lockstep.doctor.configs.training_commands import (
    TRL_COMMANDS,
    TrainingCommand,
    add_arguments,
    add_overrides,
    find_training_commands,
)
from lockstep.doctor.configs.trl_settings import trl_options, trl_program
from lockstep.doctor.configs.verl_settings import VERL_PROGRAM

SourceFramework = Literal["openrlhf", "verl", "trl", "vlm-r1"]
FRAMEWORKS: Mapping[str, str] = {"openrlhf": "OpenRLHF", "verl": "verl", "trl": "TRL", "vlm-r1": "VLM-R1"}
"""The names of the frameworks, by the value of `--from`."""
SFT_PROGRAMS = ("verl.trainer.fsdp_sft_trainer", "verl.trainer.sft_trainer", "verl.trainer.sft_trainer_ray")
"""verl's programs for supervised fine-tuning; Ray starts the ranks of the last one."""
COMMAND_LINE = "command line"
MAX_COMMAND = 1 << 20
"""Characters of a command that is given as an argument."""
_HYDRA_FLAGS = {
    "--config-name": "--config-name", "--config-path": "--config-path", "--config-dir": "--config-dir",
    "-cn": "--config-name", "-cp": "--config-path", "-cd": "--config-dir",
}  # fmt: skip
_OWN_CONFIGS = {
    "--config-name": ("/ppo_trainer", "/ppo_megatron_trainer", "/sft_trainer", "/sft_trainer_engine"),
    "--config-path": ("/verl/trainer/config",),
    "--config-dir": ("/verl/trainer/config",),
}
"""What Hydra's flags name where they name verl's own config, at the end of their values."""
_OWN_DEFAULTS = (
    "_self_", "ppo_trainer", "ppo_megatron_trainer", "sft_trainer", "sft_trainer_engine", "profiler",
    "dp_actor", "dp_ref", "dp_critic", "dp_reward_model", "dp_reward_loop", "legacy_data",
    "rollout", "hf_model", "rollout_correction", "reward", "reward_model", "dp", "fsdp", "None",
)  # fmt: skip
"""The parts of which verl's own config consists."""


@dataclass(slots=True)
class SourceCommand:
    """A training of another framework: its program and the settings that are given for it."""

    framework: SourceFramework
    program: str
    """`openrlhf.cli.train_sft`, `verl.trainer.main_ppo`, `grpo`, ..."""
    settings: ConfigSettings
    options: Mapping[str, OptionSpec]
    """The options of the program, with the defaults of the version that the settings fit. Those of commands beside it
    are called `STAGE:NAME`, such as `vllm-serve:port`."""
    location: ConfigLocation
    ranks: int | None = None
    """Number of processes that the launcher starts; None if it is not given."""
    through_ray: bool = False
    variables: Mapping[str, ShellWord] = field(default_factory=dict)
    """Variables of Ray's runtime environment."""
    words: tuple[ShellWord, ...] = ()
    """Words of the command line that are neither options nor their values."""
    own_script: bool = False
    """Whether the program is the user's own script."""
    flags: bool = True
    """Whether the settings are written as flags (`--name`)."""
    rounds: bool = False
    """Whether the training is one part of a script that generates and scores completions before it, round by round."""


def read_source(framework: SourceFramework, given: Sequence[str]) -> SourceCommand:
    """Reads one file, or a command: as one text, or as the words that a shell made of it.

    Raises:
        ConfigNotReadable: a file cannot be read or parsed.
        NotConvertible: it starts no training of the framework, or several.
    """
    if not any(each.strip() for each in given):
        raise NotConvertible("the argument is empty: name a script or a config file, or give a command")
    document, folder = _read_document(given, certain=True)
    if document.tree is not None:
        return _read_tree(framework, document)
    found = find_training_commands(document.commands)
    jobs, beside = _trainings(framework, found)
    if rounds := chooses_completions(beside):
        first, _ = _read_document(given, certain=False)  # what a condition changes has its value of the first round
        jobs, beside = _trainings(framework, find_training_commands(first.commands))
    servers = [job for job in found if job.framework == SERVER] if framework == "trl" else []
    if not jobs:
        serves = ", only a server: a run starts its engines itself" if servers else ""
        raise NotConvertible(f"{_shown(document.file)}: it starts no training of {FRAMEWORKS[framework]}{serves}")
    if len(jobs) > 1:
        lines = ", ".join(str(job.location.line) for job in jobs)
        raise NotConvertible(
            f"{_shown(document.file)}: it starts {len(jobs)} trainings (lines {lines}): put each into a file of its own"
        )
    readers = {"openrlhf": _read_openrlhf, "verl": _read_verl, "trl": _read_trl, "vlm-r1": _read_vlm_r1}
    read = readers[framework]
    source = read(jobs[0], folder)
    source.ranks, source.through_ray = jobs[0].launcher.world_size or source.ranks, jobs[0].through_ray
    source.variables = jobs[0].workers
    if not source.settings.given:
        raise NotConvertible(f"{jobs[0].location}: {jobs[0].program} is given no option")
    if rounds:
        _add_stages(source, inference_settings(beside), inference_options())
        source.rounds = True
    if len(servers) == 1:
        _add_stages(source, server_settings(servers[0]), server_options())
    return source


def _read_document(given: Sequence[str], certain: bool) -> tuple[ConfigDocument, Path]:
    """Reads a file or a command; returns it with its folder.

    Args:
        certain: whether a variable that a condition gives another value is unknown.
    """
    if len(given) == 1 and _names_file(given[0]):
        return read_config(Path(given[0]), certain=certain), Path(given[0]).parent
    text = given[0] if len(given) == 1 else shlex.join(given)
    if len(text) > MAX_COMMAND:
        raise NotConvertible(f"the command is longer than {MAX_COMMAND:,} characters: put it into a file")
    return parse_config(text, f"{COMMAND_LINE}.sh", certain=certain), Path()


def _add_stages(source: SourceCommand, settings: Iterable[ConfigSetting], options: Mapping[str, OptionSpec]) -> None:
    """Adds the settings and the options of commands beside the training."""
    for setting in settings:
        source.settings.add(setting)
    source.options = {**source.options, **options}


def _trainings(
    framework: SourceFramework, found: Sequence[TrainingCommand]
) -> tuple[list[TrainingCommand], list[TrainingCommand]]:
    """The trainings of a framework, and the commands beside them that generate or score completions."""
    mine = [job for job in found if job.framework == ("trl" if framework == "vlm-r1" else framework)]
    beside = [job for job in mine if job.program == INFERENCE]
    trainings = [job for job in mine if job.program != INFERENCE]
    return (trainings, beside) if trainings else (beside, [])


def _names_file(text: str) -> bool:
    """Whether an argument names a file: it has no white space, as a command has, or there is such a file."""
    command = any(each.isspace() for each in text)
    try:
        return Path(text).is_file() or not command
    except OSError as error:  # longer than the name of any file; it may contain a secret
        if not command:
            raise NotConvertible(
                "the argument is too long for the name of a file, and a command has more than one word"
            ) from error
        return False


def _shown(file: str) -> str:
    return COMMAND_LINE if file.startswith(COMMAND_LINE) else file


def _read_openrlhf(job: TrainingCommand, folder: Path) -> SourceCommand:
    check_convertible("openrlhf", job.program)
    if job.program not in option_programs("openrlhf"):
        known = ", ".join(option_programs("openrlhf"))
        raise NotConvertible(f"{job.program} is not converted: only {known}")
    table = option_table("openrlhf", job.program)
    settings = ConfigSettings()
    rest = add_arguments(settings, job.words, table.options, hyphens=False)
    version = table.version_for(setting.name for setting in settings)
    return SourceCommand("openrlhf", job.program, settings, table.at(version), job.location, words=tuple(rest))


def _verl_options(program: str, settings: ConfigSettings) -> dict[str, OptionSpec]:
    known = program.removesuffix("_ray") if program in SFT_PROGRAMS else VERL_PROGRAM
    table = option_table("verl", known)
    return table.at(table.version_for(setting.name for setting in settings))


def _read_verl(job: TrainingCommand, folder: Path) -> SourceCommand:
    check_convertible("verl", job.program)
    settings = ConfigSettings()
    rest = add_overrides(settings, job.words)
    program = _verl_program(job.program, settings)
    options = _verl_options(program, settings)
    kept = _add_other_configs(settings, rest)
    return SourceCommand("verl", program, settings, options, job.location, words=tuple(kept), flags=False)


def _verl_program(name: str, settings: ConfigSettings) -> str:
    """The program whose options a command or a file has: by its name, without one by an option of each."""
    if "sft" not in name and name:
        return name
    older = "model.partial_pretrain" in settings or "fsdp_sft" in name
    if not older and not name and not ("model.path" in settings and "optim.lr" in settings):
        return VERL_PROGRAM
    return SFT_PROGRAMS[0] if older else SFT_PROGRAMS[2] if name.endswith("_ray") else SFT_PROGRAMS[1]


def _add_other_configs(settings: ConfigSettings, words: Sequence[ShellWord]) -> list[ShellWord]:
    """Adds Hydra's flags that name another config than verl's own; returns the other words."""
    kept, rest = [], list(words)
    while rest:
        word = rest.pop(0)
        flag, equals, text = word.text.partition("=")
        name = _HYDRA_FLAGS.get(flag)
        if name is None:
            kept.append(word)
            continue
        value = word if equals or not rest else rest.pop(0)
        text = text if equals or value is word else value.text
        plain = text.rstrip("/").removesuffix(".yaml")
        relative = name == "--config-path" and plain.removeprefix("./") == "config"  # to verl's main_ppo
        if not relative and not f"/{plain}".endswith(_OWN_CONFIGS[name]):
            settings.add(ConfigSetting(name, text if value.known else UNKNOWN_VALUE, word.location))
    return kept


def _other_defaults(tree: Mapping[str, Any]) -> list[str]:
    """The entries of Hydra's list of defaults that are not of verl's own config."""
    given = tree.get("defaults")
    entries = given if isinstance(given, list) else [] if given is None else [given]
    names = [str(name) for each in entries for name in (each.values() if isinstance(each, dict) else [each])]
    return [each for each in names if each.rpartition("/")[2].partition("@")[0] not in _OWN_DEFAULTS]


def _read_trl(job: TrainingCommand, folder: Path) -> SourceCommand:
    """Reads the options of a command, and those of the YAML file that it names with `--config`, which they override."""
    check_convertible("trl", job.program)
    own = job.program.endswith(".py")
    program = trl_program(job.program, ConfigSettings())
    arguments = ConfigSettings()
    rest = add_arguments(arguments, job.words, trl_options(program))
    program = program or trl_program(job.program, arguments)
    settings, config = ConfigSettings(), arguments.given.pop("config", None)
    if config is not None and isinstance(config.value, str):
        document = read_config(_named_config(config.value, folder))
        for setting in _tree_settings(document, deep=False):
            settings.add(setting)
        program = program or trl_program(Path(config.value).stem, settings)
    elif config is not None:
        raise NotConvertible(f"{config.location}: the file of --config is not known: write its name, not a variable")
    for setting in arguments:
        settings.add(_positive(setting, trl_options(program)))
    for name in ("accelerate_config", "config_file"):
        if name in job.launcher.options:
            settings.add(job.launcher.options.given[name])
    program = _trl_program(program)
    source = SourceCommand("trl", program, settings, trl_options(program), job.location, words=tuple(rest))
    source.own_script, source.ranks = own, _processes(settings)
    return source


def _read_vlm_r1(job: TrainingCommand, folder: Path) -> SourceCommand:
    """Reads the options of `grpo_jsonl.py`, `grpo_rec.py`, or a script derived from them."""
    if "sft" in job.program.lower():
        raise NotConvertible(f"{job.program}: VLM-R1's SFT uses LLaMA-Factory or TRL: convert it with --from trl")
    options, settings = vlm_r1_options(), ConfigSettings()
    rest = add_arguments(settings, job.words, options)
    return SourceCommand("vlm-r1", "grpo", settings, options, job.location, words=tuple(rest))


def _named_config(name: str, folder: Path) -> Path:
    """The file of `--config`: relative to the working directory, as for TRL, or to the folder of the script."""
    here, beside = Path(name), folder / name
    try:
        found = next((each for each in (here, beside) if each.is_file()), None)
    except OSError:
        found = here
    if found is None and here != beside:
        raise NotConvertible(
            f"--config {redact_text(name)}: there is neither {here.absolute()} nor {beside.absolute()}"
        )
    return found or here


def _positive(setting: ConfigSetting, options: Mapping[str, OptionSpec]) -> ConfigSetting:
    """`--no_NAME`, which transformers' parser adds for switches that are on, as the switch turned off."""
    name = setting.name.removeprefix("no_")
    if name == setting.name or setting.name in options or name not in options:
        return setting
    return replace(setting, name=name, value=False)


def _trl_program(program: str) -> str:
    if not program:
        raise NotConvertible(
            "cannot tell which trainer of TRL this is for: name the file or the script after it "
            f"({', '.join(f'{each}.yaml' for each in TRL_COMMANDS)}), or give the command: trl sft --config FILE"
        )
    return program


def _tree_settings(document: ConfigDocument, deep: bool) -> list[ConfigSetting]:
    tree = document.tree or {}
    pairs = leaves(tree) if deep else iter(tree.items())
    nowhere = ConfigLocation(document.file, 0)
    return [  # of the variables in `env` only the names: the values may be secrets
        ConfigSetting(
            name,
            sorted(value) if not deep and name == "env" and isinstance(value, dict) else value,
            document.locations.get(name, nowhere),
        )
        for name, value in pairs
        if not (deep and (name.split(".")[0] in ("defaults", "hydra") or name.endswith("_target_")))
    ]


def _processes(settings: ConfigSettings) -> int | None:
    """The number of processes that a YAML file of TRL passes to accelerate."""
    processes = settings.integer("num_processes")
    return processes if processes is not None and processes > 0 else None


def _read_tree(framework: SourceFramework, document: ConfigDocument) -> SourceCommand:
    """Reads a YAML file of verl or TRL."""
    location, settings = ConfigLocation(document.file, 0), ConfigSettings()
    for setting in _tree_settings(document, deep=framework == "verl"):
        settings.add(setting)
    if framework in ("openrlhf", "vlm-r1"):
        shown = f"{document.file}: {FRAMEWORKS[framework]}"
        raise NotConvertible(f"{shown} has no config files, only command lines: give the script")
    if framework == "verl":
        program = _verl_program("", settings)
        source = SourceCommand("verl", program, settings, _verl_options(program, settings), location)
        if others := _other_defaults(document.tree or {}):
            settings.add(ConfigSetting("defaults", others, document.locations.get("defaults", location)))
    else:
        program = _trl_program(trl_program(Path(document.file).stem, settings))
        source = SourceCommand("trl", program, settings, trl_options(program), location, ranks=_processes(settings))
    source.flags = False
    return source


def known_value(setting: ConfigSetting) -> bool:
    """Whether nothing of the value depends on what only running the script would reveal."""
    value = setting.value
    return value is not UNKNOWN_VALUE and not (isinstance(value, list) and UNKNOWN_VALUE in value)
