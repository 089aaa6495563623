"""`lockstep explain --config`: what will hurt, from the files that describe a training."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Literal

from lockstep.doctor.configs import accelerate, deepspeed, openrlhf, trl, variables, verl
from lockstep.doctor.configs.advice import Advice
from lockstep.doctor.configs.arguments import add
from lockstep.doctor.configs.files import Document, read
from lockstep.doctor.configs.programs import Job, jobs
from lockstep.doctor.configs.settings import NotReadableError, Place, Setting, Settings
from lockstep.doctor.configs.shell import Word
from lockstep.doctor.configs.tables import table
from lockstep.doctor.configs.trl_rules import Run
from lockstep.doctor.finding import Report

Kind = Literal["script", "verl", "trl", "accelerate", "deepspeed"]
PACKAGES = ("openrlhf", "verl", "trl", "transformers")


@dataclass(slots=True)
class Given:
    """The files, by what they are."""

    jobs: list[tuple[Job, Document]] = field(default_factory=list)
    verl: list[Document] = field(default_factory=list)
    trl: list[Document] = field(default_factory=list)
    accelerate: list[Document] = field(default_factory=list)
    deepspeed: list[Document] = field(default_factory=list)


def installed() -> dict[str, str]:
    """Versions of the frameworks in this environment; by these options are judged."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return (
        found
        if "trl" in found or "transformers" not in found
        else {k: v for k, v in found.items() if k != "transformers"}
    )


def advise(paths: Sequence[Path], gpu_gib: float | None = None, versions: Mapping[str, str] | None = None) -> Report:
    """Findings about the config files at `paths`, taken together.

    Args:
        gpu_gib: memory of a GPU in GiB; without it, what fits is said for GPUs that are sold.
        versions: of the frameworks (`openrlhf`, `verl`, `trl`, `transformers`); else those installed here.

    Raises:
        NotReadableError: a file is none of the kinds that are known, or broken.
    """
    known = dict(versions if versions is not None else installed())
    given = Given()
    for path in paths:
        _sort(given, read(path))
    report = Report()
    settings = _accelerate(report, given)
    json = deepspeed.load(given.deepspeed[0]) if given.deepspeed else None
    world, trainer = _jobs(report, given, settings, json, gpu_gib, known)
    if given.deepspeed:
        world = world or (_world(settings) if settings is not None else None)
        for document in given.deepspeed:
            advice = Advice()
            deepspeed.judge(advice, document, deepspeed.load(document), world, trainer or bool(given.accelerate))
            _add(report, "deepspeed", document.file, advice)
    return report


def _add(report: Report, name: str, title: str, advice: Advice) -> None:
    report.add(name, title, dict.fromkeys(advice.findings))


def _sort(given: Given, document: Document) -> None:
    """What a document is, by what stands in it."""
    if document.tree is None:
        found = jobs(document.commands)
        if not found:
            raise NotReadableError(
                document.file,
                0,
                "no training is started here: none of OpenRLHF, verl, TRL, accelerate or a DeepSpeed config",
            )
        given.jobs.extend((job, document) for job in found)
        return
    kind = kind_of(document)
    {"verl": given.verl, "trl": given.trl, "accelerate": given.accelerate, "deepspeed": given.deepspeed}[kind].append(
        document
    )


def kind_of(document: Document) -> Literal["verl", "trl", "accelerate", "deepspeed"]:
    """Of a tree; by the keys that one of the frameworks knows, misspelt ones aside."""
    tree = document.tree or {}
    keys = set(tree)
    if "actor_rollout_ref" in keys or len(keys & {"data", "trainer", "algorithm", "critic"}) > 1:
        return "verl"
    options = table("deepspeed", "config").options
    scores = {
        "deepspeed": len({name.partition(".")[0] for name in options} & keys) + 3 * ("zero_optimization" in keys),
        "accelerate": (
            len({name.partition(".")[0] for name in table("accelerate", "config").options} & keys)
            + 3 * ("distributed_type" in keys or "compute_environment" in keys)
        ),
        "trl": (
            len(set(trl.options_of("grpo")) & keys | set(trl.options_of("sft")) & keys)
            + 3 * ("model_name_or_path" in keys)
            + 3 * ("per_device_train_batch_size" in keys)
        ),
    }
    best = max(scores, key=lambda kind: (scores[kind], kind == "trl"))
    if scores[best] == 0:
        raise NotReadableError(document.file, 1, "settings of none of OpenRLHF, verl, TRL, accelerate and DeepSpeed")
    return best  # type: ignore[return-value]


def _accelerate(report: Report, given: Given) -> Settings | None:
    settings = None
    for document in given.accelerate:
        advice = Advice()
        settings = accelerate.judge(advice, document)
        advice.say(
            "accelerate-read",
            "ok",
            f"options judged by accelerate {table('accelerate', 'config').versions[-1]}",
            at=Place(document.file, 0),
        )
        _add(report, "accelerate", document.file, advice)
    return settings


def _world(settings: Settings) -> int | None:
    processes = settings.whole("num_processes")
    return processes if processes and processes > 0 else None


def _jobs(
    report: Report,
    given: Given,
    settings: Settings | None,
    json: Settings | None,
    gpu_gib: float | None,
    versions: dict[str, str],
) -> tuple[int | None, bool]:
    """Findings of all trainings; the processes of the last one, and whether a Trainer reads the DeepSpeed file."""
    world, trainer = None, bool(given.trl)
    taken: set[str] = set()
    for job, document in given.jobs:
        advice, folder = Advice(), Path(document.file).parent
        if job.framework == "openrlhf":
            openrlhf.judge(advice, job, folder, gpu_gib, versions.get("openrlhf"))
        elif job.framework == "verl":
            verl.of_job(advice, job, folder, gpu_gib, versions.get("verl"))
        elif job.framework == "trl":
            trainer = True
            world = job.launcher.world or (_world(settings) if settings is not None else None)
            trl.judge(advice, _run(job, given, settings, json, world, taken, advice), folder, gpu_gib, versions)
        else:
            continue
        world = job.launcher.world or world
        variables.judge(advice, {**job.shell, **job.workers})
        _add(report, job.framework, f"{job.place}: {job.program}", advice)
    for document in given.verl:
        advice = Advice()
        verl.of_document(advice, document, Path(document.file).parent, gpu_gib, versions.get("verl"))
        _add(report, "verl", document.file, advice)
    for document in given.trl:
        if document.file in taken:
            continue
        advice = Advice()
        own = _settings(document)
        program = trl.program_of(Path(document.file).name, own)
        world = world or (_world(settings) if settings is not None else None)
        run = Run(program, own, Place(document.file, 0), world, _variables(document), settings, json, own_script=True)
        trl.judge(advice, run, Path(document.file).parent, gpu_gib, versions)
        variables.judge(advice, run.variables)
        _add(report, "trl", document.file, advice)
    return world, trainer


def _settings(document: Document) -> Settings:
    """Top-level keys, as TrlParser takes them."""
    settings = Settings()
    for name, value in (document.tree or {}).items():
        settings.add(Setting(name, value, document.places.get(name, Place(document.file, 0))))
    return settings


def _variables(document: Document) -> dict[str, Word]:
    """`env` of TrlParser's YAML."""
    block = (document.tree or {}).get("env")
    if not isinstance(block, dict):
        return {}
    return {
        name: Word(str(value), document.places.get(f"env.{name}", Place(document.file, 0)))
        for name, value in block.items()
    }


def _run(
    job: Job,
    given: Given,
    settings: Settings | None,
    json: Settings | None,
    world: int | None,
    taken: set[str],
    advice: Advice,
) -> Run:
    """A command's options over those of the YAML that it names with --config."""
    line = Settings()
    program = trl.program_of(job.program, line)
    add(line, job.words, trl.options_of(program))
    program = program or trl.program_of(job.program, line)
    both, variables = Settings(), dict(job.shell)
    config = line.text("config")
    if config is not None:
        named = [document for document in given.trl if Path(document.file).name == Path(config).name]
        for document in named:
            taken.add(document.file)
            variables |= _variables(document)
            for setting in _settings(document):
                both.add(setting)
            program = program or trl.program_of("", both)
        if not named:
            advice.unchecked(
                "file-missing",
                f"--config {config} is not among the files",
                f"give it too: --config {config}",
                line.place("config"),
            )
    for setting in line:
        both.add(setting)
    for name, documents in (("deepspeed", given.deepspeed), ("config_file", given.accelerate)):
        place, said = (
            (line.place(name), line.text(name))
            if name == "deepspeed"
            else (job.launcher.options.place(name), job.launcher.options.text(name))
        )
        if said and not documents and re.search(r"\.(json|ya?ml)$", said):
            advice.unchecked("file-missing", f"{said} is not among the files", f"give it too: --config {said}", place)
    own = job.program.endswith(".py") and job.program.removesuffix(".py") not in (
        "grpo",
        "sft",
        "dpo",
        "kto",
        "reward",
        "rloo",
    )
    return Run(program, both, job.place, world, variables, settings, json, own)
