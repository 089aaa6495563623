"""Generates the reference page of environment variables as Markdown: `python -m
lockstep.doctor.environment.variable_reference`.
"""

import sys
from collections.abc import Iterable, Iterator
from textwrap import wrap

from lockstep.doctor.environment.variable_table import (
    EnvironmentVariable,
    HarmfulValue,
    LibraryVariables,
    ValueCondition,
    VariableTable,
    load_variables,
)

_INTRODUCTION = """\
# Variables, and what they really do

Much advice sets variables that nothing reads, that were renamed, that contradict each other, or that were meant for an
hour of debugging and slow every run since. `lockstep check --env` looks at the environment of the shell (and at NCCL's
own files, `/etc/nccl.conf` and `~/.nccl.conf`) and says so, with what to do and who says that. It is part of
`lockstep check`, and of every incident: `findings.json` in its folder, the report of the run, and `lockstep explain`
of the incident say what was odd about the environment of the processes.

`lockstep check --env-file FILE` looks at a text in place of the shell: `export_handle` lines, the output of `env`,
`docker run
-e`, a Dockerfile, `#SBATCH --export`, `mpirun -x`, Python's `os.environ[...] = ...`, the `env` blocks of Kubernetes and
compose files, `docker inspect`, a Ray runtime environment, `/proc/PID/environ`, an incident's `environment.json`; `-`
is standard input. Several files are several hosts, which are then compared. `lockstep check --env --launcher ray` says
what of this shell workers on other hosts will not see. With `--hosts`, the variables that probes have on their hosts
are looked at and compared.

| finding | means |
|---|---|
| `env-unread` | nobody reads it, or not yet in the version that is installed |
| `env-gone` | it was read once, and is not any more |
| `env-renamed` | it is read, and has another name today |
| `env-misspelt` | nobody reads it, and a name beside it is read; only among names that begin as a library's do |
| `env-unknown` | it begins as a library's variables do and is in no list of them |
| `env-value` | its reader refuses the value, or takes it for something else |
| `env-conflict` | two variables contradict each other |
| `env-left-on` | it slows, weakens or endangers a run while it is set |
| `env-differs` | hosts have different values |
| `env-not-seen` | it is set where the job is started and does not reach the workers |
| `env-fine` | nothing of this |

The exit code of `lockstep check` is 1 where a finding is an error, 0 otherwise, 2 where the file cannot be read or no
variable is set in it; with `--json` findings are printed as JSON. Values of variables that are not listed below, and of
those that hold secrets, are never printed. Users' own variables are left alone.

What follows is made from data files (`python -m lockstep.doctor.environment.variable_reference`); each statement
names the documentation or the source that it was checked against. A variable that is not here may still be known by
name.
"""


def reference_page(table: VariableTable | None = None) -> str:
    """The whole page."""
    table = table or load_variables()
    lines = [_INTRODUCTION, "## How variables reach workers", "", *_launchers(table)]
    for library in table.libraries:
        lines += ["", f"## {library.title[0].upper()}{library.title[1:]}", "", *_library_section(library)]
        for variable in library.variables:
            lines += ["", f"### `{variable.name}`", "", *_variable_lines(variable)]
    return "\n".join(lines) + "\n"


def _launchers(table: VariableTable) -> Iterator[str]:
    yield "What of the shell's environment `--launcher` says that workers on other hosts get, and how to pass more on:"
    for each in table.launchers.values():
        passes = ", ".join(f"`{name}`" for name in each.forwards) or "nothing"
        yield ""
        yield from _wrapped(f"**`{each.name}`** passes on {passes}. {each.why} To pass a variable on: "
                            f"{each.fix.format(name='NAME')}. {_links(each.sources)}")  # fmt: skip


def _library_section(library: LibraryVariables) -> Iterator[str]:
    more = f", and {len(library.names)} more by name" if library.names else ""
    yield from _wrapped(f"Looked through: {library.read}. {len(library.variables)} variables{more}.")
    if unread := [each.name for each in library.variables if not each.readers]:
        yield ""
        yield from _wrapped(f"Read by nobody: {_code(unread)}.")
    if library.gone:
        gone = ", ".join(f"`{name}` ({until})" for name, until in library.gone.items())
        yield ""
        yield from _wrapped(f"Not read any more since the version in brackets: {gone}.")


def _variable_lines(variable: EnvironmentVariable) -> Iterator[str]:
    """What is known of one variable: what it does, then its values, versions and what hurts, a line each."""
    if variable.readers:
        yield from _wrapped(variable.does)
    else:
        meant = f"`{variable.renamed}`" if variable.renamed else variable.instead
        yield from _wrapped(f"**Read by nobody.** {variable.does} Instead: {meant}.")
    items = [
        ("use", variable.use), ("values", _values(variable)), ("versions", _versions(variable)),
        ("hurts", variable.hurts), *((_harm_text(each), each.why) for each in variable.left_on),
        *((f"with `{each.other}` ({_condition_text(each.other_when)})", each.why) for each in variable.conflicts),
        ("see", _links(variable.sources)),
    ]  # fmt: skip
    yield ""
    for name, text in items:
        if text:
            yield from _wrapped(f"- {name}: {text}", "  ")


def _wrapped(text: str, indent: str = "") -> list[str]:
    words = " ".join(text.split())
    return wrap(words, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _values(variable: EnvironmentVariable) -> str:
    kinds = {"flag": "0 or 1", "boolean": "true or false", "integer": "whole number", "choices": "list"}
    listed = ", ".join(f"`{each}`" for each in variable.values if each)
    low, high = variable.range or (None, None)
    bounds = [f"{sign} {limit:.15g}" for sign, limit in ((">=", low), ("<=", high)) if limit is not None]
    kind = "" if variable.kind in ("choice", "text") else kinds.get(variable.kind, variable.kind)
    parts = [part for part in (kind, listed, " and ".join(bounds)) if part]
    return "; ".join([*parts, *([f"default `{variable.default}`"] if variable.default else [])])


def _versions(variable: EnvironmentVariable) -> str:
    renamed = f"now `{variable.renamed}`" + (f" ({variable.renamed_since})" if variable.renamed_since else "")
    return ", ".join(
        part
        for part in (
            f"since {variable.since}" if variable.since else "",
            f"not since {variable.until}" if variable.until else "",
            renamed if variable.renamed and variable.readers else "",
        )
        if part
    )


def _condition_text(when: ValueCondition) -> str:
    words = {"set": "any value", "on": "on", "off": "off", "empty": "empty"}
    several = (when,) if isinstance(when, str) else when
    return " or ".join(words.get(each, "some values" if each[0] == "~" else f"`{each}`") for each in several)


def _harm_text(harm: HarmfulValue) -> str:
    where = {None: "", "several": "several hosts", "cuda": "a job on GPUs"}[harm.where]
    known = [part for part in (where, f"GPUs such as {harm.gpus}xx" if harm.gpus else "") if part]
    return _condition_text(harm.when) + (f" ({', '.join(known)})" if known else "")


def _links(sources: tuple[str, ...]) -> str:
    pages = (each.removeprefix("docs/") for each in sources)
    return " ".join(f"<{each}>" if "://" in each else f"[{each}]({each})" for each in pages)


if __name__ == "__main__":
    sys.stdout.write(reference_page())
