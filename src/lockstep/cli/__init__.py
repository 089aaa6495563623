"""The command `lockstep`: one file per subcommand, imported only when that subcommand runs."""

from importlib import import_module
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from lockstep import __version__

_COMMANDS = {
    "train": "Train a model as configured in the file: SFT, DPO, reward models, GRPO, PPO, online DPO, ...",
    "tiny": "Create a tiny language or vision-language model with random weights and a character-level tokenizer.",
    "check": "Find out before a run what would make it fail, hang or crawl, and how to fix it.",
    "convert": "Convert a launch script or config of OpenRLHF, verl, TRL or VLM-R1 to a run's file.",
    "watch": "Run any training command (torchrun, accelerate, mpirun, python) and report which process blocks it.",
    "top": "Show every process of a run: stage, progress, collectives and waits; suspects are at the top.",
    "timeline": "Write a timeline of a run for Perfetto: stages, collectives, requests, weight sync, waits, incidents.",
    "report": "Write the HTML report of a run, finished or not, and list its incidents.",
    "dashboard": "Show runs in a browser, live: curves, stages, waits, hosts and GPUs, samples, incidents, configs.",
    "samples": "Show completions of a run's step with their rewards: from the best to the worst, or only one end.",
    "export": "Write the model of a run's checkpoint, for transformers, vLLM or the next run.",
    "generate": "Complete prompts with the model of a run, or with any other.",
    "eval": "Score the model of a run, or any other, on held-out prompts with the run's rewards.",
    "serve-reward": "Serve a reward model over HTTP, in the forms of OpenRLHF and vLLM.",
    "push": "Upload the model of a run, or an exported one, to the Hugging Face hub, with a model card.",
    "explain": "Find out what went wrong in a job, and how to fix it, from logs, dumps and incidents.",
}
"""The first paragraph of each subcommand's help, repeated here so that `lockstep --help` imports no subcommand."""

OWN_PROCESS = "own process"
"""The `obj` of the command line's context if this process runs nothing else, so that workers may be forked from it."""

_UsageError: Any = typer.BadParameter.__mro__[1]
"""Click's class of errors in a command line, of which typer has a copy in some versions."""


class _Subcommand(TyperCommand):
    """A subcommand whose help shows no type for options without a value, and whose errors say what to type instead."""

    def get_params(self, ctx: Any) -> Any:
        """Returns options and arguments."""
        params = super().get_params(ctx)
        for param in params:
            if getattr(param, "is_flag", False):
                param.metavar = ""
        return params

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Reads the command line."""
        given = list(args)
        try:
            return super().parse_args(ctx, args)
        except _UsageError as error:
            from lockstep.cli.usage_hints import usage_hint  # imports the config

            valued = {
                name for param in self.get_params(ctx) if not getattr(param, "is_flag", True) for name in param.opts
            }
            hint = usage_hint(str(self.name), given, getattr(error, "option_name", ""), valued)
            if hint:
                raise _UsageError(f"{error.message}. {hint}", ctx) from error
            raise


_FILES = {
    "samples": "show_samples",
    "serve-reward": "serve_reward",
    "check": "check.check_command",
    "report": "report.report_command",
    "dashboard": "report.dashboard_command",
}
"""The modules of the subcommands whose names are those of other modules, or of a folder."""


class _LazyGroup(TyperGroup):
    """Lists all subcommands without importing them, and imports the one that runs."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        for name, text in _COMMANDS.items():
            self.add_command(TyperCommand(name, help=text, short_help=text))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Returns the name, the imported command and the remaining arguments."""
        name, command, rest = super().resolve_command(ctx, args)
        return name, load_command(name) if name in _COMMANDS else command, rest


def load_command(name: str) -> Any:
    """Imports a subcommand and returns it."""
    single = typer.Typer(pretty_exceptions_enable=False, add_completion=False)
    single.command(name, cls=_Subcommand)(import_module(f"lockstep.cli.{_FILES.get(name, name)}").command)
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


def _show_version(requested: bool) -> None:
    if requested:
        typer.echo(f"lockstep {__version__}")  # without rich, which takes long to import
        raise typer.Exit


@app.callback()
def main(
    version: bool = typer.Option(False, "--version", callback=_show_version, is_eager=True, help="Show the version."),
) -> None:
    """Reinforcement-learning post-training that never waits in silence."""
