"""The command `lockstep`: one file per subcommand, imported only when that subcommand runs."""

from importlib import import_module
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from lockstep import __version__

_COMMANDS = {
    "train": "Train a model: SFT or GRPO, as configured in the file.",
    "tiny": "Create a tiny Qwen2- or Llama-type model with random weights and a character-level tokenizer.",
    "check": "Check before a run what would make it fail, hang or crawl, and show the fix.",
    "watch": "Run a command and report which process blocks it: torchrun, accelerate, mpirun, plain Python.",
    "top": "Show every process of a run: stage, progress, collectives and waits; suspects are at the top.",
    "report": "Write the HTML report of a run, finished or not, and list its incidents.",
    "explain": "Find out what went wrong in a job, and how to fix it, from logs, dumps and incidents.",
}
"""By name, the first paragraph of its help: `lockstep --help` imports no subcommand."""


class _LazyGroup(TyperGroup):
    """Lists stubs of all subcommands and imports the one that runs."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        for name, text in _COMMANDS.items():
            self.add_command(TyperCommand(name, help=text, short_help=text))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Name, command and remaining arguments, with the command's module imported."""
        name, command, rest = super().resolve_command(ctx, args)
        return name, load_command(name) if name in _COMMANDS else command, rest


def load_command(name: str) -> Any:
    """The command of that name, with its module imported."""
    single = typer.Typer(pretty_exceptions_enable=False, add_completion=False)
    single.command(name)(import_module(f"lockstep.cli.{name}").command)
    return typer.main.get_command(single)


app = typer.Typer(
    name="lockstep",
    cls=_LazyGroup,
    rich_markup_mode=None,  # importing rich would take most of the time of `lockstep --help`
    help="Reinforcement-learning post-training that never waits in silence.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"lockstep {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Show the version."),
) -> None:
    """Reinforcement-learning post-training that never waits in silence."""
