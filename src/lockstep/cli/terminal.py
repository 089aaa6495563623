"""How errors and notes look on the terminal, and the exit codes.

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
from lockstep.doctor.output.explanation import terminal_safe

FAILED, REFUSED, INTERRUPTED = 1, 2, 130


def show_refusal(error: Exception) -> None:
    """Every problem on its own line, on standard error."""
    console = Console(stderr=True, soft_wrap=True)
    if isinstance(error, ConfigError):
        console.print(f"[bold red]refused[/] {_shown(error.source)}")
        for problem in error.problems:
            field = f"[bold]{_shown(problem.field)}[/]: " if problem.field else ""
            hint = f" [dim]({_shown(problem.hint)})[/]" if problem.hint else ""
            console.print(f"  {field}{_shown(problem.message)}{hint}")
    else:
        console.print(f"[bold red]refused[/] {_shown(str(error))}")


def show_note(text: str) -> None:
    """Something to know, on standard error."""
    Console(stderr=True, soft_wrap=True).print(f"[yellow]note[/] {_shown(text)}")


def _shown(text: str) -> str:
    """As it is: neither markup nor anything that a terminal obeys. Some of it comes from other hosts."""
    return escape(terminal_safe(text))
