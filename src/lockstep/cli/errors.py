"""How errors look on the terminal, and which exit code they have.

| code | meaning |
|---|---|
| 0 | done |
| 1 | the run failed |
| 2 | refused before anything started: config, data, placement, run folder |
| 130 | ended by Ctrl-C; the run can be resumed |
"""

from rich.console import Console
from rich.markup import escape

from lockstep.config.errors import ConfigError

FAILED, REFUSED, INTERRUPTED = 1, 2, 130


def show_refusal(error: Exception) -> None:
    """Every problem on its own line, on standard error."""
    console = Console(stderr=True, soft_wrap=True)
    if isinstance(error, ConfigError):
        console.print(f"[bold red]refused[/] {escape(error.source)}")
        for problem in error.problems:
            field = f"[bold]{escape(problem.field)}[/]: " if problem.field else ""
            hint = f" [dim]({escape(problem.hint)})[/]" if problem.hint else ""
            console.print(f"  {field}{escape(problem.message)}{hint}")
    else:
        console.print(f"[bold red]refused[/] {escape(str(error))}")


def show_note(text: str) -> None:
    """Something to know, on standard error."""
    Console(stderr=True, soft_wrap=True).print(f"[yellow]note[/] {escape(text)}")
