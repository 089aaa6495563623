"""`lockstep explain`: what went wrong in a job, from its logs, dumps and incidents, or what will go wrong, from its
configs."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lockstep.cli.terminal import FAILED, REFUSED, ReadingProgress
from lockstep.report.command_events import TERMINAL

if TYPE_CHECKING:
    from lockstep.doctor.bundle.case_bundle import WrittenBundle
    from lockstep.doctor.output.job_answer import JobAnswer


def command(
    paths: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="PATH",
            help="Logs, folders of logs, archives, flight-recorder dumps and incidents, in any mixture; glob patterns; "
            "'-' for standard input.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print only JSON.")] = False,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Also write the answer as an HTML page.")
    ] = None,
    rules: Annotated[
        list[Path] | None,
        typer.Option(
            "--rules",
            metavar="DIR",
            help="Additional knowledge files; their rules replace built-in rules with the same id.",
        ),
    ] = None,
    ranks: Annotated[
        str | None,
        typer.Option(
            metavar="PATTERN",
            help="Where the rank is in the dumps' names, such as 'host-*/trace-{rank}.bin'.",
        ),
    ] = None,
    world_size: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Number of ranks of the job; taken from the dumps by default."),
    ] = None,
    redact: Annotated[
        Path | None,
        typer.Option(
            "--redact",
            metavar="BUNDLE",
            help="Also write a bundle for a bug report, a folder or BUNDLE.zip: the files without hosts, addresses, "
            "users, paths, run names and secrets. The answer, also with --html and --json, is that of the bundle.",
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="With --redact: replace an earlier bundle; nothing else is replaced.")
    ] = False,
    share_case: Annotated[
        Path | None,
        typer.Option(
            "--share-case",
            metavar="FOLDER",
            help="Also add the redacted files to a corpus of cases (truth.json, jobs/ID), with the verdict's class as "
            "a proposal.",
        ),
    ] = None,
    cause: Annotated[
        str | None,
        typer.Option("--class", metavar="CLASS", help="With --share-case: the class that you confirm."),
    ] = None,
    culprits: Annotated[
        list[str] | None,
        typer.Option("--culprit", metavar="NAME", help="With --share-case: a culprit, `rank:3` or a host. Repeatable."),
    ] = None,
    configs: Annotated[
        list[Path] | None,
        typer.Option(
            "--config",
            metavar="FILE",
            help="Check a launch script or config of OpenRLHF, verl, TRL, accelerate or DeepSpeed instead of logs. "
            "Repeat the option for files that belong together.",
        ),
    ] = None,
    gpu_gib: Annotated[
        float | None,
        typer.Option("--gpu-memory", min=1, metavar="GIB", help="With --config: memory of one GPU in GiB."),
    ] = None,
) -> None:
    """Find out what went wrong in a job, and how to fix it, from logs, dumps and incidents.

    Examples:

        lockstep explain logs/

        lockstep explain slurm-4711.out dumps/ --json

        kubectl logs trainer-0 | lockstep explain -

        lockstep explain runs/sort-grpo --html answer.html

        lockstep explain logs/ --redact bundle.zip

        lockstep explain --config train.sh --config zero3.json --gpu-memory 80
    """
    if configs:
        if paths:
            TERMINAL.refuse(ValueError("give either PATH... or --config, not both"))
            raise typer.Exit(REFUSED)
        _show_advice(configs, gpu_gib, as_json)
        return
    if not paths:
        TERMINAL.refuse(ValueError("nothing to explain: give PATH... or --config FILE"))
        raise typer.Exit(REFUSED)
    if (cause or culprits) and share_case is None:
        TERMINAL.refuse(ValueError("--class and --culprit belong to --share-case FOLDER"))
        raise typer.Exit(REFUSED)
    answer = _answer(paths, rules or [], ranks, world_size)
    bundle = _write_bundle(answer, redact, force) if redact is not None else None
    shown = bundle.answer if bundle is not None else answer
    if html is not None:
        _write_page(shown, html)
    if as_json:
        typer.echo(json.dumps(shown.json(), indent=2))
    else:
        _show(shown)
    if bundle is not None:
        _say(bundle.lines)
    if share_case is not None:
        _share(answer, share_case, cause, culprits or [])


def _write_bundle(answer: "JobAnswer", bundle: Path, force: bool) -> "WrittenBundle":
    """Writes the bundle, whose answer is all that the command shows then. Exits if it is refused."""
    from lockstep.doctor.bundle.case_bundle import write_bundle

    try:
        return write_bundle(answer, bundle, force=force)
    except (ValueError, OSError) as error:
        TERMINAL.refuse(error)
        raise typer.Exit(REFUSED) from error


def _write_page(answer: "JobAnswer", file: Path) -> None:
    from lockstep.doctor.output.answer_page import answer_page

    try:
        file.write_text(answer_page(answer), encoding="utf-8")
    except OSError as error:
        TERMINAL.refuse(error)
        raise typer.Exit(REFUSED) from error


def _share(answer: "JobAnswer", corpus: Path, cause: str | None, culprits: list[str]) -> None:
    """Adds the case to the corpus, and says what is in it. Exits if it is refused."""
    from lockstep.doctor.bundle.case_bundle import share_case

    try:
        name, found = share_case(answer, corpus, cause=cause, culprits=culprits)
    except (ValueError, OSError) as error:
        TERMINAL.refuse(error)
        raise typer.Exit(REFUSED) from error
    unconfirmed = "" if cause else "; confirm its class: give --class, or edit truth.json"
    _say([*found.lines, f"added as jobs/{name}{unconfirmed}"])


def _say(lines: list[str]) -> None:
    """Prints lines on standard error."""
    from lockstep.report.safe_console import SafeConsole

    console = SafeConsole(stderr=True, soft_wrap=True)
    for line in lines:
        console.print(line, markup=False)


def _answer(paths: list[str], rules: list[Path], ranks: str | None, world_size: int | None) -> "JobAnswer":
    """Reads and judges, with progress on standard error. Exits if there is nothing to read, or a file is damaged."""
    from lockstep.doctor.output.job_answer import answer_job
    from lockstep.ledger.errors import LedgerError

    try:
        with ReadingProgress() as progress:
            return answer_job(paths, rules, ranks=ranks, world_size=world_size, progress=progress)
    except (ValueError, OSError, LedgerError) as error:
        TERMINAL.refuse(error)
        raise typer.Exit(REFUSED) from error


def _show(answer: "JobAnswer") -> None:
    """Prints the answer, and in one line each: further recorded verdicts, findings about the environment."""
    from lockstep.doctor.output.explanation import render_answer
    from lockstep.report.safe_console import SafeConsole
    from lockstep.watch.supervisor.incident import verdict_headline

    console = SafeConsole()
    console.print(render_answer(answer))
    for verdict in answer.further:
        console.print(f"also: {verdict.kind}: {verdict_headline(verdict)}", style="dim", markup=False)
    for each in answer.environment:
        console.print(f"environment: {each}", style="yellow", markup=False)


def _show_advice(files: Sequence[Path], gpu_gib: float | None, as_json: bool) -> None:
    """Prints findings about the configs. Exits with 0 without errors, 1 with errors, and 2 if a file cannot be read."""
    from lockstep.doctor.configs.config_advisor import advise_configs
    from lockstep.doctor.output.findings_table import render_report
    from lockstep.report.safe_console import SafeConsole

    try:
        report = advise_configs(files, gpu_gib)
    except (ValueError, OSError) as error:
        TERMINAL.refuse(error)
        raise typer.Exit(REFUSED) from error
    if as_json:
        typer.echo(json.dumps(report.json(), indent=2))
    else:
        SafeConsole().print(render_report(report))
    raise typer.Exit(0 if report.passed else FAILED)
