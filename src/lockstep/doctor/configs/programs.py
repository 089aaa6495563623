"""Which training a command starts: through ray job submit, accelerate, torchrun, deepspeed, srun or by itself."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Literal

from lockstep.doctor.configs.arguments import add
from lockstep.doctor.configs.settings import NotReadableError, Place, Settings
from lockstep.doctor.configs.shell import Command, Word
from lockstep.doctor.configs.words import UNSET

Framework = Literal["openrlhf", "verl", "trl", "accelerate", "deepspeed", "vllm-serve"]


@dataclass(slots=True)
class Launcher:
    """What stands in front of the program."""

    name: str = ""
    processes_per_node: int | None = None
    nodes: int | None = None
    processes: int | None = None
    """Of all nodes, where it is told so."""
    options: Settings = field(default_factory=Settings)

    @property
    def world(self) -> int | None:
        """How many processes it starts, if that is told."""
        if self.processes is not None:
            return self.processes
        return self.processes_per_node * (self.nodes or 1) if self.processes_per_node is not None else None


@dataclass(slots=True)
class Job:
    """A training program with its arguments as they stand."""

    framework: Framework
    program: str
    """Module, subcommand or file."""
    words: tuple[Word, ...]
    """Its arguments."""
    place: Place
    launcher: Launcher = field(default_factory=Launcher)
    shell: dict[str, Word] = field(default_factory=dict)
    """Variables that the shell exports to it."""
    workers: dict[str, Word] = field(default_factory=dict)
    """Variables of Ray's runtime environment."""
    through_ray: bool = False


_MODULES = (
    (re.compile(r"openrlhf[./]cli[./](train_\w+)"), "openrlhf"),
    (re.compile(r"verl[./](?:trainer|experimental)[./].*main\w*|verl\.trainer\.\w*sft\w*|recipe[./].*main\w*"), "verl"),
    (re.compile(r"trl[./]scripts[./](?:grpo|sft|dpo|kto|reward|rloo)"), "trl"),
)
TRL_COMMANDS = ("grpo", "rloo", "sft", "dpo", "kto", "reward")
_TRAINING_FLAG = re.compile(
    r"--(per[_-]device[_-]train[_-]batch[_-]size|model[_-]name[_-]or[_-]path|output[_-]dir|deepspeed)\b"
)


def jobs(commands: Sequence[Command]) -> list[Job]:
    """The trainings that `commands` start."""
    return [job for command in commands if (job := _job(command)) is not None]


def _job(command: Command) -> Job | None:
    words = command.words
    shell = dict(command.environment)
    texts = [word.text for word in words]
    for index, text in enumerate(texts):
        plain = text.removesuffix(".py")
        for pattern, framework in _MODULES:
            if pattern.fullmatch(plain) or ("/" in plain and pattern.fullmatch(_tail(plain, pattern))):
                program = plain.replace("/", ".")
                match = pattern.search(program) or pattern.search(plain)
                name = match[0].replace("/", ".") if match else program
                return _made(framework, name, index, words, shell)
        if text == "trl" and index + 1 < len(texts):
            if texts[index + 1] in TRL_COMMANDS:
                return _made("trl", texts[index + 1], index + 1, words, shell)
            if texts[index + 1] == "vllm-serve":
                return _made("vllm-serve", "vllm-serve", index + 1, words, shell)
        launched = any(_known(each) for each in texts[:index])
        if text.endswith(".py") and (launched or any(_TRAINING_FLAG.match(each) for each in texts[index + 1 :])):
            return _made("trl", PurePosixPath(text).name, index, words, shell)
    return None


def _tail(path: str, pattern: re.Pattern[str]) -> str:
    """The end of a path that begins with the package's name."""
    match = re.search(r"(?:^|/)((?:openrlhf|verl|recipe|trl)/.*)$", path)
    return match[1] if match else path


def _made(framework: str, program: str, index: int, words: tuple[Word, ...], shell: dict[str, Word]) -> Job:
    before = words[:index]
    job = Job(framework, program, words[index + 1 :], words[index].place, shell=shell)  # type: ignore[arg-type]
    texts = [word.text for word in before]
    job.through_ray = texts[:3] == ["ray", "job", "submit"] or ("submit" in texts and "ray" in texts)
    for word in before:
        if match := re.match(r"([A-Z][A-Z0-9_]*)=", word.text):
            job.shell[match[1]] = Word(word.text[match.end() :], word.place)
    _runtime_environment(job, before)
    job.launcher = _launcher(before)
    if framework == "trl" and program in TRL_COMMANDS:
        _accelerate_options(job)
    return job


def _runtime_environment(job: Job, before: Sequence[Word]) -> None:
    """`--runtime-env-json`: the variables that Ray gives the job's driver and its workers."""
    for index, word in enumerate(before):
        name, equals, value = word.text.partition("=")
        if name != "--runtime-env-json":
            continue
        text = value if equals else before[index + 1].text if index + 1 < len(before) else ""
        if not word.known or UNSET in text:
            continue
        try:
            tree = json.loads(text)
        except (ValueError, RecursionError) as error:
            said = getattr(error, "msg", "nested too deeply")
            raise NotReadableError(
                word.place.file, word.place.line, f"--runtime-env-json is not JSON: {said}"
            ) from error
        variables = tree.get("env_vars") if isinstance(tree, dict) else None
        if isinstance(variables, dict):
            job.workers |= {str(key): Word(str(value), word.place) for key, value in variables.items()}


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdigit() and len(text) < 10 else None


def _launcher(before: Sequence[Word]) -> Launcher:
    options = Settings()
    add(options, before, {})
    name = next((_known(word.text) for word in before if _known(word.text)), "")
    launcher = Launcher(name, options=options)
    if name in ("torchrun", "deepspeed"):
        launcher.processes_per_node = _number(options.text("nproc_per_node") or options.text("num_gpus"))
        launcher.nodes = _number(options.text("nnodes") or options.text("num_nodes"))
        include = options.text("include")
        if include and name == "deepspeed" and "@" not in include and include.count(":") == 1:
            launcher.processes_per_node = include.count(",") + 1
    elif name == "accelerate":
        launcher.processes = _number(options.text("num_processes"))
        launcher.nodes = _number(options.text("num_machines"))
    return launcher


def _known(text: str) -> str:
    name = PurePosixPath(text).name
    if name in ("torchrun", "torch.distributed.run", "torch.distributed.launch"):
        return "torchrun"
    return name if name in ("accelerate", "deepspeed") else ""


def _accelerate_options(job: Job) -> None:
    """`trl grpo` hands these to accelerate's launcher."""
    kept: list[Word] = []
    rest = list(job.words)
    job.launcher.name = "accelerate"
    while rest:
        word = rest.pop(0)
        name, equals, value = word.text.partition("=")
        if name in ("--num_processes", "--num_machines", "--accelerate_config", "--config_file", "--main_process_port"):
            said = value if equals else rest.pop(0).text if rest else ""
            if name == "--num_processes":
                job.launcher.processes = _number(said)
            elif name == "--num_machines":
                job.launcher.nodes = _number(said)
            continue
        kept.append(word)
    job.words = tuple(kept)
