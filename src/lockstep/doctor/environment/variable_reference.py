"""Generates the reference page of environment variables, `docs/environment-lint.md`.

The command is `python -m lockstep.doctor.environment.variable_reference`.
"""

import sys
from collections.abc import Iterable, Iterator
from textwrap import wrap

from lockstep.base.text import count_noun
from lockstep.doctor.environment.variable_table import (
    EnvironmentVariable,
    HarmfulValue,
    LibraryVariables,
    ValueCondition,
    VariableTable,
    load_variables,
)

_INTRODUCTION = """\
# Environment variables, and what they really do

Much advice on the web sets variables that nothing reads, that were renamed, that contradict each other, or that were
meant for an hour of debugging and slow down every run since. `lockstep check --env` checks the environment of the shell
and NCCL's configuration files (`/etc/nccl.conf` and `~/.nccl.conf`), and shows fixes and sources. The same findings are
part of `lockstep check` and of every incident: they are in `findings.json` in the folder of the incident, in the report
of the run, and in the output of `lockstep explain`.

`lockstep check --env-file FILE` checks a file instead of the shell: `export` lines, the output of `env`, `docker run
-e`, a Dockerfile, `#SBATCH --export`, `mpirun -x`, Python's `os.environ[...] = ...`, the `env` blocks of Kubernetes and
compose files, `docker inspect`, a Ray runtime environment, `/proc/PID/environ`, an incident's `environment.json`; `-`
is standard input. Several files are compared as several hosts. `lockstep check --env --launcher ray` shows which
variables of this shell do not reach workers on other hosts. With `--hosts`, the variables of all hosts are checked and
compared.

| finding | means |
|---|---|
| `env-unread` | nothing reads it, or the installed version does not read it yet |
| `env-gone` | it is no longer read |
| `env-renamed` | it has a new name |
| `env-misspelt` | nothing reads it, but a similar name is read; only for names with a library's prefix |
| `env-unknown` | it has a library's prefix, but is not in the list of the library's variables |
| `env-value` | the program that reads it rejects or misinterprets the value |
| `env-conflict` | two variables contradict each other |
| `env-left-on` | the value slows down, weakens or endangers a run |
| `env-differs` | hosts have different values |
| `env-not-seen` | it is set where the job is started, but does not reach the workers |
| `env-fine` | no problem |

The exit code of `lockstep check` is 1 if a finding is an error, 0 otherwise, and 2 if the file cannot be read or sets
no variable; `--json` prints the findings as JSON. Values of variables that are not listed below, and secrets, are never
printed. Users' own variables are not checked.

The rest of this page is generated from data files (`python -m lockstep.doctor.environment.variable_reference`). Each
statement was checked against the documentation or source code that `see` names. The check knows the names of more
variables than are listed here.
"""


def reference_page(table: VariableTable | None = None) -> str:
    """Returns the reference page as Markdown."""
    table = table or load_variables()
    lines = [_INTRODUCTION, "## How variables reach workers", "", *_launchers(table)]
    for library in table.libraries:
        lines += ["", f"## {library.title[0].upper()}{library.title[1:]}", "", *_library_section(library)]
        for variable in library.variables:
            lines += ["", f"### `{variable.name}`", "", *_variable_lines(variable)]
    return "\n".join(lines) + "\n"


def _launchers(table: VariableTable) -> Iterator[str]:
    yield "The shell's variables that each `--launcher` forwards to workers on other hosts, and how to add more:"
    for each in table.launchers.values():
        passes = ", ".join(f"`{name}`" for name in each.forwards) or "nothing"
        yield ""
        yield from _wrapped(f"**`{each.name}`** forwards {passes}. {each.why} To forward a variable: "
                            f"{each.fix.format(name='NAME')}. {_links(each.sources)}")  # fmt: skip


def _library_section(library: LibraryVariables) -> Iterator[str]:
    more = f", and {len(library.names)} more by name" if library.names else ""
    yield from _wrapped(
        f"List taken from {library.listed_from}. {count_noun(len(library.variables), 'variable')}{more}."
    )
    if unread := [each.name for each in library.variables if not each.readers]:
        yield ""
        yield from _wrapped(f"Nothing reads: {_code(unread)}.")
    if library.removed:
        removed = ", ".join(f"`{name}` ({until})" for name, until in library.removed.items())
        yield ""
        yield from _wrapped(f"No longer read since the version in brackets: {removed}.")


def _variable_lines(variable: EnvironmentVariable) -> Iterator[str]:
    """Describes a variable: what it does, then its values, versions and harmful values, one line each."""
    if variable.readers:
        yield from _wrapped(variable.does)
    else:
        meant = f"`{variable.renamed}`" if variable.renamed else variable.instead
        yield from _wrapped(f"**Nothing reads it.** {variable.does} Instead: {meant}.")
    items = [
        ("use", variable.use), ("values", _values(variable)), ("versions", _versions(variable)),
        ("hurts", variable.hurts), *((_harm_text(each), each.why) for each in variable.harmful_values),
        *((f"with `{each.other}` ({_condition_text(each.other_when)})", each.why) for each in variable.conflicts),
        ("see", _links(variable.sources)),
    ]  # fmt: skip
    yield ""
    for name, text in items:
        if text:
            yield from _wrapped(f"- {name}: {text}", "  ")


def _wrapped(text: str, indent: str = "") -> list[str]:
    one_line = " ".join(text.split())
    return wrap(one_line, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


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
    texts = {"set": "any value", "on": "on", "off": "off", "empty": "empty"}
    conditions = (when,) if isinstance(when, str) else when
    return " or ".join(texts.get(each, "some values" if each[0] == "~" else f"`{each}`") for each in conditions)


def _harm_text(harm: HarmfulValue) -> str:
    where = {None: "", "several": "several hosts", "cuda": "a job on GPUs"}[harm.where]
    known = [part for part in (where, f"GPUs such as {harm.gpus}xx" if harm.gpus else "") if part]
    return _condition_text(harm.when) + (f" ({', '.join(known)})" if known else "")


def _links(sources: tuple[str, ...]) -> str:
    pages = (each.removeprefix("docs/") for each in sources)
    return " ".join(f"<{each}>" if "://" in each else f"[{each}]({each})" for each in pages)


if __name__ == "__main__":
    sys.stdout.write(reference_page())
