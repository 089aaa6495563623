"""How errors and notes look on the terminal, and the exit codes.

| code | meaning |
|---|---|
| 0 | done |
| 1 | the run failed |
| 2 | refused before anything started: config, data, placement, run folder |
| 130 | ended by Ctrl-C; the run can be resumed |
"""

FAILED, REFUSED, INTERRUPTED = 1, 2, 130


def show_refusal(error: Exception) -> None:
    """Prints why nothing was started on standard error, one problem per line."""
    from rich.console import Console

    from lockstep.config.errors import ConfigError

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
    """Prints a note on standard error."""
    from rich.console import Console

    Console(stderr=True, soft_wrap=True).print(f"[yellow]note[/] {_shown(text)}")


def _shown(text: str) -> str:
    """Escapes rich markup and terminal control sequences: some texts come from other hosts."""
    from rich.markup import escape

    from lockstep.base.text import terminal_safe

    return escape(terminal_safe(text))
