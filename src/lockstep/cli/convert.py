"""`lockstep convert`: a run's file from a launch script, a command or a config of another framework."""

import json
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lockstep.base.text import count_noun
from lockstep.cli.terminal import PARTIAL, REFUSED, print_text
from lockstep.report.command_events import TERMINAL

if TYPE_CHECKING:
    from lockstep.convert.converter import ConvertedConfig


class Source(StrEnum):
    """The frameworks."""

    openrlhf = "openrlhf"
    verl = "verl"
    trl = "trl"
    vlm_r1 = "vlm-r1"


def command(
    given: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE|COMMAND", help="A script or config file, a command in quotes, or its words after `--`."
        ),
    ],
    source: Annotated[Source, typer.Option("--from", help="The framework that it is for.")],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FILE", help="File to write; standard output by default.")
    ] = None,
    rows: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Number of rows of the training data, from which epochs become steps."),
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Number of processes of the trainer, where batch sizes are per process."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the config and what became of each option as JSON.")
    ] = False,
) -> None:
    """Convert a launch script or config of OpenRLHF, verl, TRL or VLM-R1 to a run's file.

    Nothing of the input is executed. Exits with 0 if the run means the same, with 3 if something is left to do (it is
    listed), and with 2 if nothing was written.

    Examples:

        lockstep convert --from openrlhf train_grpo.sh -o grpo.yaml --rows 20000

        lockstep convert --from trl sft.yaml --ranks 8 --rows 15000 -o sft.yaml

        lockstep convert --from verl -- python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files=d
    """
    from lockstep.convert.conversion import ConversionFacts
    from lockstep.convert.converter import convert

    try:
        if out is not None:
            _check_place(out, force)
        converted = convert(source.value, given, ConversionFacts(rows, ranks))
        if out is not None:
            _write(out, converted.text, force)
    except (ValueError, OSError) as error:
        TERMINAL.refuse(error)
        raise typer.Exit(REFUSED) from error
    if as_json:
        typer.echo(json.dumps(_as_json(converted), indent=2))
    elif out is None:
        print_text(converted.text.rstrip("\n"))
        for line in _report(converted):
            TERMINAL.note(line)
    else:
        print_text("\n".join([f"{out}: recipe {converted.recipe}", *_report(converted)]))
    raise typer.Exit(0 if converted.complete else PARTIAL)


def _check_place(out: Path, force: bool) -> None:
    """Raises OSError if the file cannot be written there."""
    if out.is_dir():
        raise IsADirectoryError(f"--out {out} is a folder: name a file in it")
    if not out.parent.is_dir():
        raise FileNotFoundError(f"--out {out}: there is no folder {out.parent}: create it first")
    if not force and (out.exists() or out.is_symlink()):
        raise FileExistsError(f"{out} exists: choose another --out, or overwrite it with --force")


def _write(out: Path, text: str, force: bool) -> None:
    from lockstep.base.folders import write_atomically

    if force:
        write_atomically(out, text.encode())
    else:
        with out.open("x", encoding="utf-8") as stream:
            stream.write(text)


def _as_json(converted: "ConvertedConfig") -> dict[str, object]:
    options = [
        {"name": each.name, "outcome": each.kind, "fields": list(each.fields), "text": each.text, "line": each.line}
        for each in converted.outcomes
    ]
    return {
        "complete": converted.complete,
        "config": dict(converted.values),
        "options": options,
        "missing": dict(converted.missing),
        "notes": list(converted.notes),
    }


def _report(converted: "ConvertedConfig") -> Iterator[str]:
    """What became of the options: those that are left first."""
    done = converted.of_kind("converted")
    yield f"converted {len(done)} of {count_noun(len(converted.outcomes), 'option')}"
    for each in converted.of_kind("unsupported", "unknown"):
        kind = "not converted" if each.kind == "unsupported" else "unknown"
        yield f"{kind}: {each.name} (line {each.line}): {each.text}"
    for field, text in converted.missing.items():
        yield f"missing: {field}: {text}"
    for each in converted.of_kind("unneeded"):
        yield f"not needed: {each.name}: {each.text}"
    for text in converted.notes:
        yield f"remark: {text}"
