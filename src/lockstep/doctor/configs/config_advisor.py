"""`lockstep explain --config`: reads launch scripts and configs of other frameworks and reports what will go wrong."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Literal

from lockstep.doctor.configs import shared_rules
from lockstep.doctor.configs.accelerate_rules import judge_accelerate
from lockstep.doctor.configs.config_files import ConfigDocument, leaves, read_config
from lockstep.doctor.configs.config_settings import (
    ConfigFindings,
    ConfigLocation,
    ConfigNotReadable,
    ConfigSetting,
    ConfigSettings,
)
from lockstep.doctor.configs.deepspeed_rules import judge_deepspeed, load_deepspeed
from lockstep.doctor.configs.openrlhf_rules import judge_openrlhf
from lockstep.doctor.configs.option_tables import option_table
from lockstep.doctor.configs.shell_scripts import ShellWord
from lockstep.doctor.configs.training_commands import (
    TRL_COMMANDS,
    TrainingCommand,
    add_arguments,
    add_overrides,
    find_training_commands,
)
from lockstep.doctor.configs.trl_rules import judge_trl
from lockstep.doctor.configs.trl_settings import TRLConfig, trl_options, trl_program
from lockstep.doctor.configs.verl_rules import judge_verl
from lockstep.doctor.configs.verl_settings import (
    VERL_PROGRAM,
    judge_verl_environment,
)
from lockstep.doctor.output.findings import CheckReport


def judge_verl_command(
    advice: ConfigFindings, job: TrainingCommand, folder: Path, gpu_gib: float | None, installed: str | None
) -> None:
    """Judges a verl command line."""
    raw = ConfigSettings()
    positional = add_overrides(raw, job.words)
    config = next((word.text for word in positional if word.text.startswith("--config-name")), "")
    for index, word in enumerate(positional):
        is_for_hydra = (
            word.text.startswith("-")
            or not word.known
            or (
                index
                and positional[index - 1].text
                in ("--config-name", "--config-path", "--config-dir", "-cn", "-cp", "-cd")
            )
        )
        if not is_for_hydra:
            advice.error(
                "option-unknown",
                f"'{word.text}' is not an override",
                "Hydra expects key=value. Is a backslash missing at the end of the line above?",
                "",
                at=word.location,
            )
    other_defaults = "--config-path" in {word.text.partition("=")[0] for word in positional} or (
        config and "ppo" not in config
    )
    judge_verl(
        advice,
        raw,
        job.program,
        config,
        job.location,
        {**job.shell, **job.workers},
        folder,
        gpu_gib,
        installed,
        bool(other_defaults),
    )
    judge_verl_environment(advice, job, raw)


def judge_verl_file(
    advice: ConfigFindings, document: ConfigDocument, folder: Path, gpu_gib: float | None, installed: str | None
) -> None:
    """Judges a verl YAML file."""
    raw = ConfigSettings()
    for name, value in leaves(document.tree or {}):
        if name.split(".")[0] in ("defaults", "hydra") or name.endswith("_target_"):
            continue
        raw.add(ConfigSetting(name, value, document.locations.get(name, ConfigLocation(document.file, 0))))
    other_defaults = "defaults" in (document.tree or {})
    judge_verl(
        advice, raw, VERL_PROGRAM, "", ConfigLocation(document.file, 0), {}, folder, gpu_gib, installed, other_defaults
    )


DocumentKind = Literal["script", "verl", "trl", "accelerate", "deepspeed"]
PACKAGES = ("openrlhf", "verl", "trl", "transformers")


@dataclass(slots=True)
class GivenConfigs:
    """The given files, by kind."""

    jobs: list[tuple[TrainingCommand, ConfigDocument]] = field(default_factory=list)
    """The trainings that the given scripts start, with their scripts."""
    verl: list[ConfigDocument] = field(default_factory=list)
    trl: list[ConfigDocument] = field(default_factory=list)
    accelerate: list[ConfigDocument] = field(default_factory=list)
    deepspeed: list[ConfigDocument] = field(default_factory=list)


def installed_frameworks() -> dict[str, str]:
    """Versions of the frameworks that are installed here, by package.

    Without TRL, transformers alone says nothing about the training's versions and is left out.
    """
    found = {}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    if "trl" not in found:
        found.pop("transformers", None)
    return found


def advise_configs(
    paths: Sequence[Path], gpu_gib: float | None = None, versions: Mapping[str, str] | None = None
) -> CheckReport:
    """Judges config files that belong together.

    Args:
        gpu_gib: memory of a GPU in GiB; without it, findings name the common GPUs that are large enough.
        versions: versions of `openrlhf`, `verl`, `trl` and `transformers`; by default the installed ones.

    Raises:
        ConfigNotReadable: a file cannot be parsed or is of an unknown kind.
    """
    known = dict(versions if versions is not None else installed_frameworks())
    given = GivenConfigs()
    for path in paths:
        _add_document(given, read_config(path))
    report = CheckReport()
    settings = _judge_accelerate_file(report, given)
    deepspeed = load_deepspeed(given.deepspeed[0]) if given.deepspeed else None
    world_size, trainer = _judge_commands(report, given, settings, deepspeed, gpu_gib, known)
    if given.deepspeed:
        world_size = world_size or (_configured_processes(settings) if settings is not None else None)
        for document in given.deepspeed:
            advice = ConfigFindings()
            judge_deepspeed(advice, document, load_deepspeed(document), world_size, trainer or bool(given.accelerate))
            _add_section(report, "deepspeed", document.file, advice)
    return report


def _add_section(report: CheckReport, name: str, title: str, advice: ConfigFindings) -> None:
    report.add(name, title, dict.fromkeys(advice.findings))


def _add_document(given: GivenConfigs, document: ConfigDocument) -> None:
    """Adds a document under the kind that its content indicates."""
    if document.tree is None:
        found = find_training_commands(document.commands)
        if not found:
            raise ConfigNotReadable(
                document.file,
                0,
                "this script starts no training: found none of OpenRLHF, verl, TRL, accelerate and DeepSpeed",
            )
        given.jobs.extend((job, document) for job in found)
        return
    kind = document_kind(document)
    {"verl": given.verl, "trl": given.trl, "accelerate": given.accelerate, "deepspeed": given.deepspeed}[kind].append(
        document
    )


def document_kind(document: ConfigDocument) -> Literal["verl", "trl", "accelerate", "deepspeed"]:
    """The framework that knows most keys of a YAML or JSON file."""
    tree = document.tree or {}
    keys = set(tree)
    if "actor_rollout_ref" in keys or len(keys & {"data", "trainer", "algorithm", "critic"}) > 1:
        return "verl"
    options = option_table("deepspeed", "config").options
    scores = {
        "deepspeed": len({name.partition(".")[0] for name in options} & keys) + 3 * ("zero_optimization" in keys),
        "accelerate": (
            len({name.partition(".")[0] for name in option_table("accelerate", "config").options} & keys)
            + 3 * ("distributed_type" in keys or "compute_environment" in keys)
        ),
        "trl": (
            len(set(trl_options("grpo")) & keys | set(trl_options("sft")) & keys)
            + 3 * ("model_name_or_path" in keys)
            + 3 * ("per_device_train_batch_size" in keys)
        ),
    }
    best = max(scores, key=lambda kind: (scores[kind], kind == "trl"))
    if scores[best] == 0:
        raise ConfigNotReadable(
            document.file, 1, "none of its settings is known to OpenRLHF, verl, TRL, accelerate or DeepSpeed"
        )
    return best  # type: ignore[return-value]


def _judge_accelerate_file(report: CheckReport, given: GivenConfigs) -> ConfigSettings | None:
    settings = None
    for document in given.accelerate:
        advice = ConfigFindings()
        settings = judge_accelerate(advice, document)
        advice.add(
            "accelerate-read",
            "ok",
            f"options judged by accelerate {option_table('accelerate', 'config').versions[-1]}",
            at=ConfigLocation(document.file, 0),
        )
        _add_section(report, "accelerate", document.file, advice)
    return settings


def _configured_processes(settings: ConfigSettings) -> int | None:
    processes = settings.integer("num_processes")
    return processes if processes and processes > 0 else None


def _judge_commands(
    report: CheckReport,
    given: GivenConfigs,
    settings: ConfigSettings | None,
    deepspeed: ConfigSettings | None,
    gpu_gib: float | None,
    versions: dict[str, str],
) -> tuple[int | None, bool]:
    """Judges all trainings.

    Returns the number of processes of the last one, and whether transformers' Trainer reads the DeepSpeed file.
    """
    world_size, trainer = None, bool(given.trl)
    used_files: set[str] = set()
    for job, document in given.jobs:
        advice, folder = ConfigFindings(), Path(document.file).parent
        if job.framework == "openrlhf":
            judge_openrlhf(advice, job, folder, gpu_gib, versions.get("openrlhf"))
        elif job.framework == "verl":
            judge_verl_command(advice, job, folder, gpu_gib, versions.get("verl"))
        elif job.framework == "trl":
            trainer = True
            world_size = job.launcher.world_size or (_configured_processes(settings) if settings is not None else None)
            config = _trl_config(job, given, settings, deepspeed, world_size, used_files, advice)
            judge_trl(advice, config, folder, gpu_gib, versions)
        else:
            continue
        world_size = job.launcher.world_size or world_size
        shared_rules.judge_script_variables(advice, {**job.shell, **job.workers})
        _add_section(report, job.framework, f"{job.location}: {job.program}", advice)
    for document in given.verl:
        advice = ConfigFindings()
        judge_verl_file(advice, document, Path(document.file).parent, gpu_gib, versions.get("verl"))
        _add_section(report, "verl", document.file, advice)
    for document in given.trl:
        if document.file in used_files:
            continue
        advice = ConfigFindings()
        yaml_settings = _document_settings(document)
        program = trl_program(Path(document.file).name, yaml_settings)
        world_size = world_size or (_configured_processes(settings) if settings is not None else None)
        config = TRLConfig(
            program,
            yaml_settings,
            ConfigLocation(document.file, 0),
            world_size,
            _document_variables(document),
            settings,
            deepspeed,
            own_script=True,
        )
        judge_trl(advice, config, Path(document.file).parent, gpu_gib, versions)
        shared_rules.judge_script_variables(advice, config.variables)
        _add_section(report, "trl", document.file, advice)
    return world_size, trainer


def _document_settings(document: ConfigDocument) -> ConfigSettings:
    """The top-level keys of a YAML file, as TrlParser reads them."""
    settings = ConfigSettings()
    for name, value in (document.tree or {}).items():
        settings.add(ConfigSetting(name, value, document.locations.get(name, ConfigLocation(document.file, 0))))
    return settings


def _document_variables(document: ConfigDocument) -> dict[str, ShellWord]:
    """The environment variables in the `env` section of TrlParser's YAML file."""
    block = (document.tree or {}).get("env")
    if not isinstance(block, dict):
        return {}
    return {
        name: ShellWord(str(value), document.locations.get(f"env.{name}", ConfigLocation(document.file, 0)))
        for name, value in block.items()
    }


def _trl_config(
    job: TrainingCommand,
    given: GivenConfigs,
    settings: ConfigSettings | None,
    deepspeed: ConfigSettings | None,
    world_size: int | None,
    used_files: set[str],
    advice: ConfigFindings,
) -> TRLConfig:
    """The settings of a TRL command: its options, and those of the YAML file that it names with --config."""
    arguments = ConfigSettings()
    program = trl_program(job.program, arguments)
    add_arguments(arguments, job.words, trl_options(program))
    program = program or trl_program(job.program, arguments)
    merged, variables = ConfigSettings(), dict(job.shell)
    config = arguments.text("config")
    if config is not None:
        named = [document for document in given.trl if Path(document.file).name == Path(config).name]
        for document in named:
            used_files.add(document.file)
            variables |= _document_variables(document)
            for setting in _document_settings(document):
                merged.add(setting)
            program = program or trl_program("", merged)
        if not named:
            advice.unchecked(
                "file-missing",
                f"--config {config} is not among the given files",
                f"also give --config {config}",
                arguments.location_of("config"),
            )
    for setting in arguments:
        merged.add(setting)
    for name, documents in (("deepspeed", given.deepspeed), ("config_file", given.accelerate)):
        location, file = (
            (arguments.location_of(name), arguments.text(name))
            if name == "deepspeed"
            else (job.launcher.options.location_of(name), job.launcher.options.text(name))
        )
        if file and not documents and re.search(r"\.(json|ya?ml)$", file):
            advice.unchecked(
                "file-missing", f"{file} is not among the given files", f"also give --config {file}", location
            )
    of_trl = (*TRL_COMMANDS, "dpo_online")
    own_script = job.program.endswith(".py") and job.program.removesuffix(".py") not in of_trl
    return TRLConfig(program, merged, job.location, world_size, variables, settings, deepspeed, own_script)
