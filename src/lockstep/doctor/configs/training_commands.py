"""Finds the training that a shell command starts, through any launcher, and parses its arguments (argparse and
Hydra)."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any, Literal

from lockstep.base.json_text import MalformedJson, parse_json
from lockstep.config.yaml_text import MAX_YAML_DEPTH, MalformedYaml, parse_yaml
from lockstep.doctor.configs.config_files import leaves
from lockstep.doctor.configs.config_settings import (
    UNKNOWN_VALUE,
    ConfigLocation,
    ConfigNotReadable,
    ConfigSetting,
    ConfigSettings,
)
from lockstep.doctor.configs.option_tables import OptionSpec
from lockstep.doctor.configs.shell_scripts import ShellCommand, ShellWord
from lockstep.doctor.configs.shell_words import UNSET


def add_arguments(
    settings: ConfigSettings, words: Sequence[ShellWord], options: Mapping[str, OptionSpec], hyphens: bool = True
) -> list[ShellWord]:
    """Parses options as argparse does, adds them to `settings`, and returns the positional arguments.

    Args:
        options: the known options, which say how many values each takes; an unknown one takes the next word unless that
            is an option itself.
        hyphens: whether `--a-b` means `a_b`.
    """
    positional: list[ShellWord] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not word.text.startswith("--") or len(word.text) == 2:
            positional.append(word)
            continue
        name, equals, value = word.text[2:].partition("=")
        if hyphens:
            name = name.replace("-", "_")
        name = complete_option(name, options) or name
        option = options.get(name)
        takes_list = option is not None and (option.nargs is not None or option.type == "list")
        argument: Any = _argument_value(value, word.known)
        if not equals:
            taken: list[ShellWord] = []
            while (
                rest
                and not _is_option(rest[0].text)
                and (takes_list or not taken)
                and not (option and option.type == "flag")
            ):
                taken.append(rest.pop(0))
            values = [_argument_value(each.text, each.known) for each in taken]
            argument = values if takes_list else values[0] if values else True
        settings.add(ConfigSetting(name, argument, word.location))
    return positional


def _is_option(text: str) -> bool:
    return text.startswith("--") or (len(text) > 1 and text[0] == "-" and text[1].isalpha())


def complete_option(name: str, options: Mapping[str, OptionSpec]) -> str | None:
    """The option that argparse selects for a possibly abbreviated name; None if there is not exactly one."""
    if name in options:
        return name
    longer = [each for each in options if each.startswith(name)]
    return longer[0] if len(longer) == 1 and name else None


def _argument_value(text: str, known: bool) -> Any:
    return text if known else UNKNOWN_VALUE


def add_overrides(settings: ConfigSettings, words: Sequence[ShellWord]) -> list[ShellWord]:
    """Adds Hydra's overrides `a.b=c`, `+a.b=c`, `++a.b=c` and `~a.b` to `settings`; returns the other words."""
    positional: list[ShellWord] = []
    for word in words:
        text = word.text
        if text.startswith("~"):
            settings.add(ConfigSetting(text[1:].partition("=")[0], None, word.location, removed=True))
            continue
        forced = text.startswith("+")
        name, equals, value = text.lstrip("+").partition("=")
        if not equals or text.startswith("-") or not name or UNSET in name:
            positional.append(word)
            continue
        parsed = parse_hydra_value(value) if word.known else UNKNOWN_VALUE
        if isinstance(parsed, dict) and parsed:
            for leaf, each in leaves(parsed, name):
                settings.add(ConfigSetting(leaf, each, word.location, forced))
        else:
            settings.add(ConfigSetting(name, parsed, word.location, forced))
    return positional


def parse_hydra_value(text: str) -> Any:
    """Parses a value approximately like Hydra: null, booleans, numbers, quoted text, lists and mappings."""
    stripped = text.strip()
    if stripped.lower() in ("null", "none", ""):
        return None
    if stripped.lower() in ("true", "false"):
        return stripped.lower() == "true"
    if len(stripped) > 1 and stripped[0] == stripped[-1] and stripped[0] in "'\"":
        return stripped[1:-1]
    if stripped[0] in "[{" and len(stripped) < 20_000:
        try:
            return parse_yaml(stripped, "the value")
        except (MalformedYaml, TypeError):  # keys that are lists
            return text
    return text


Framework = Literal["openrlhf", "verl", "trl", "accelerate", "deepspeed", "vllm-serve"]


@dataclass(slots=True)
class LaunchCommand:
    """The launcher in front of a training program."""

    name: str = ""
    processes_per_node: int | None = None
    nodes: int | None = None
    processes: int | None = None
    """Number of processes on all nodes together, if given."""
    nodes_known: bool = True
    """False if the number of nodes is given by something that only running the script reveals, or may change."""
    options: ConfigSettings = field(default_factory=ConfigSettings)

    @property
    def world_size(self) -> int | None:
        """Number of processes that the launcher starts on all nodes; None if it is not given."""
        if self.processes is not None:
            return self.processes
        if not self.nodes_known:
            return None
        return self.processes_per_node * (self.nodes or 1) if self.processes_per_node is not None else None


@dataclass(slots=True)
class TrainingCommand:
    """A training program with its unparsed arguments."""

    framework: Framework
    program: str
    """Module, subcommand or file."""
    words: tuple[ShellWord, ...]
    """The program's arguments."""
    location: ConfigLocation
    launcher: LaunchCommand = field(default_factory=LaunchCommand)
    shell: dict[str, ShellWord] = field(default_factory=dict)
    """Variables exported by the shell."""
    workers: dict[str, ShellWord] = field(default_factory=dict)
    """Variables of Ray's runtime environment."""
    through_ray: bool = False
    """Whether `ray job submit` starts it."""


_MODULES = (
    (re.compile(r"openrlhf[./]cli[./](train_\w+|batch_inference)"), "openrlhf"),
    (
        re.compile(r"verl[./](?:trainer|experimental)[./].*main\w*|verl[./]trainer[./]\w*sft\w*|recipe[./].*main\w*"),
        "verl",
    ),
    (re.compile(r"trl[./]scripts[./](?:grpo|sft|dpo|kto|reward|rloo)"), "trl"),
)
_OPENRLHF_SCRIPT = re.compile(r"(?:.*/)?(train_(?:sft|dpo|rm|kd|prm|kto|ppo|ppo_ray)|batch_inference)\.py")
"""Scripts of old versions of OpenRLHF, which were not in its package; they have the option `--pretrain`."""
TRL_COMMANDS = ("grpo", "rloo", "sft", "dpo", "kto", "reward")
_TRL_TRAININGS = (*TRL_COMMANDS, "distillation")
"""Those of which the options are not known, too."""
_TRAINING_FLAG = re.compile(
    r"--(per[_-]device[_-]train[_-]batch[_-]size|model[_-]name[_-]or[_-]path|output[_-]dir|deepspeed)\b"
)


def find_training_commands(commands: Sequence[ShellCommand]) -> list[TrainingCommand]:
    """The training programs started by `commands`."""
    return [job for command in commands if (job := _training_command(command)) is not None]


def _training_command(command: ShellCommand) -> TrainingCommand | None:
    words = command.words
    shell = dict(command.environment)
    texts = [word.text for word in words]
    for index, text in enumerate(texts):
        plain = text.removesuffix(".py")
        for pattern, framework in _MODULES:
            if pattern.fullmatch(plain) or ("/" in plain and pattern.fullmatch(_package_path(plain, pattern))):
                program = plain.replace("/", ".")
                match = pattern.search(program) or pattern.search(plain)
                name = match[0].replace("/", ".") if match else program
                return _make_command(framework, name, index, words, shell)
        if text == "trl" and index + 1 < len(texts):
            if texts[index + 1] in _TRL_TRAININGS:
                return _make_command("trl", texts[index + 1], index + 1, words, shell)
            if texts[index + 1] == "vllm-serve":
                return _make_command("vllm-serve", "vllm-serve", index + 1, words, shell)
        old = _OPENRLHF_SCRIPT.fullmatch(text)
        if old is not None and any(each.partition("=")[0] == "--pretrain" for each in texts[index + 1 :]):
            return _make_command("openrlhf", f"openrlhf.cli.{old[1]}", index, words, shell)
        launched = any(_launcher_name(each) for each in texts[:index])
        if text.endswith(".py") and (launched or any(_TRAINING_FLAG.match(each) for each in texts[index + 1 :])):
            return _make_command("trl", PurePosixPath(text).name, index, words, shell)
    return None


def _package_path(path: str, pattern: re.Pattern[str]) -> str:
    """The part of a path that begins with the package's name."""
    match = re.search(r"(?:^|/)((?:openrlhf|verl|recipe|trl)/.*)$", path)
    return match[1] if match else path


def _make_command(
    framework: str, program: str, index: int, words: tuple[ShellWord, ...], shell: dict[str, ShellWord]
) -> TrainingCommand:
    before = words[:index]
    job = TrainingCommand(framework, program, words[index + 1 :], words[index].location, shell=shell)  # type: ignore[arg-type]
    texts = [word.text for word in before]
    job.through_ray = texts[:3] == ["ray", "job", "submit"] or ("submit" in texts and "ray" in texts)
    for word in before:
        if match := re.match(r"([A-Z][A-Z0-9_]*)=", word.text):
            job.shell[match[1]] = ShellWord(word.text[match.end() :], word.location)
    _read_runtime_environment(job, before)
    job.launcher = _launch_command(before)
    if framework == "trl" and program in _TRL_TRAININGS:
        _split_accelerate_options(job)
    return job


def _read_runtime_environment(job: TrainingCommand, before: Sequence[ShellWord]) -> None:
    """Reads the variables for the job's workers from Ray's `--runtime-env-json`."""
    for index, word in enumerate(before):
        name, equals, value = word.text.partition("=")
        if name != "--runtime-env-json":
            continue
        text = value if equals else before[index + 1].text if index + 1 < len(before) else ""
        try:
            tree = parse_json(text, "--runtime-env-json", max_depth=MAX_YAML_DEPTH)
        except MalformedJson as error:
            if UNSET in text:  # what is not known may be more than one value
                continue
            raise ConfigNotReadable(
                word.location.file, word.location.line, f"--runtime-env-json {error.problem}"
            ) from error
        variables = tree.get("env_vars") if isinstance(tree, dict) else None
        if isinstance(variables, dict):
            job.workers |= {
                str(key): ShellWord(str(value), word.location)
                for key, value in variables.items()
                if UNSET not in str(key)
            }


def _to_int(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdigit() and len(text) < 10 else None


def _node_count(text: str | None) -> int | None:
    """A number of nodes, also as torchrun's range `2:2`; None for one that may change (`2:4`)."""
    fewest, _, most = (text or "").partition(":")
    return _to_int(fewest) if most in ("", fewest) else None


def _launch_command(before: Sequence[ShellWord]) -> LaunchCommand:
    options = ConfigSettings()
    add_arguments(options, before, {})
    name = next((_launcher_name(word.text) for word in before if _launcher_name(word.text)), "")
    launcher = LaunchCommand(name, options=options)
    if name in ("torchrun", "deepspeed"):
        launcher.processes_per_node = _to_int(options.text("nproc_per_node") or options.text("num_gpus"))
        launcher.nodes = _node_count(options.text("nnodes") or options.text("num_nodes"))
        others = ("nnodes", "num_nodes", "hostfile")
        listed = any(each in options for each in others) or any(word.text == "-H" for word in before)
        launcher.nodes_known = launcher.nodes is not None or not listed
        include = options.text("include")
        if include and name == "deepspeed" and "@" not in include and include.count(":") == 1:
            launcher.processes_per_node = include.count(",") + 1
    elif name == "accelerate":
        launcher.processes = _to_int(options.text("num_processes"))
        launcher.nodes = _to_int(options.text("num_machines"))
    return launcher


def _launcher_name(text: str) -> str:
    """The launcher that a word starts; empty if it starts none."""
    name = PurePosixPath(text).name
    if name in ("torchrun", "torch.distributed.run", "torch.distributed.launch"):
        return "torchrun"
    return name if name in ("accelerate", "deepspeed") else ""


def _split_accelerate_options(job: TrainingCommand) -> None:
    """Moves the options that the command `trl` passes to accelerate from the training to its launcher."""
    kept: list[ShellWord] = []
    rest = list(job.words)
    job.launcher.name = "accelerate"
    while rest:
        word = rest.pop(0)
        name, equals, value = word.text.partition("=")
        if name in ("--num_processes", "--num_machines", "--accelerate_config", "--config_file", "--main_process_port"):
            given = ShellWord(value, word.location) if equals else rest.pop(0) if rest else word
            argument = given.text
            if name in ("--accelerate_config", "--config_file"):
                value_known = _argument_value(argument, given.known)
                job.launcher.options.add(ConfigSetting(name[2:], value_known, word.location))
            if name == "--num_processes":
                job.launcher.processes = _to_int(argument)
            elif name == "--num_machines":
                job.launcher.nodes = _to_int(argument)
            continue
        kept.append(word)
    job.words = tuple(kept)
