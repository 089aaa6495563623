"""The command `lockstep`: one file per subcommand."""

import typer

from lockstep import __version__
from lockstep.cli import check, explain, report, tiny, top, train, watch

app = typer.Typer(
    name="lockstep",
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


app.command("train")(train.command)
app.command("tiny")(tiny.command)
app.command("check")(check.command)
app.command("watch")(watch.command)
app.command("top")(top.command)
app.command("report")(report.command)
app.command("explain")(explain.command)
