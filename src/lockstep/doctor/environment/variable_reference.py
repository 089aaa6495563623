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

Much advice on the web sets variables that nothing reads, that were renamed, that contradict each other, or that were
meant for an hour of debugging and slow down every run since. `lockstep check --env` judges the environment of the shell
(and NCCL's own files, `/etc/nccl.conf` and `~/.nccl.conf`), and shows fixes and sources. The same findings are part of
`lockstep check` and of every incident: in `findings.json` in its folder, in the report of the run, and in `lockstep
explain`.

`lockstep check --env-file FILE` judges a text instead of the shell: `export` lines, the output of `env`, `docker run
-e`, a Dockerfile, `#SBATCH --export`, `mpirun -x`, Python's `os.environ[...] = ...`, the `env` blocks of Kubernetes and
compose files, `docker inspect`, a Ray runtime environment, `/proc/PID/environ`, an incident's `environment.json`; `-`
is standard input. Several files are compared as several hosts. `lockstep check --env --launcher ray` shows which
variables of this shell do not reach workers on other hosts. With `--hosts`, the variables of all probes are judged and
compared.

| finding | means |
|---|---|
| `env-unread` | nothing reads it, or not yet in the installed version |
| `env-gone` | it is no longer read |
| `env-renamed` | it has a new name |
| `env-misspelt` | nothing reads it, but a similar name is read; only for names with a library's prefix |
| `env-unknown` | it has a library's prefix, but is in none of its lists |
| `env-value` | its reader refuses or misinterprets the value |
| `env-conflict` | two variables contradict each other |
| `env-left-on` | it slows down, weakens or endangers a run |
| `env-differs` | hosts have different values |
| `env-not-seen` | it is set where the job is started, but does not reach the workers |
| `env-fine` | no problem |

The exit code of `lockstep check` is 1 if a finding is an error, 0 otherwise, and 2 if the file cannot be read or sets
no variable; `--json` prints the findings as JSON. Values of variables that are not listed below, and secrets, are never
printed. Users' own variables are not judged.

The rest is generated from data files (`python -m lockstep.doctor.environment.variable_reference`); each statement names
the documentation or source that it was checked against. Variables that are not listed here may still be known by name.
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
    yield "The shell's variables that each `--launcher` forwards to workers on other hosts, and how to add more:"
    for each in table.launchers.values():
        passes = ", ".join(f"`{name}`" for name in each.forwards) or "nothing"
        yield ""
        yield from _wrapped(f"**`{each.name}`** forwards {passes}. {each.why} To forward a variable: "
                            f"{each.fix.format(name='NAME')}. {_links(each.sources)}")  # fmt: skip


def _library_section(library: LibraryVariables) -> Iterator[str]:
    more = f", and {len(library.names)} more by name" if library.names else ""
    yield from _wrapped(f"Source of the lists: {library.read}. {len(library.variables)} variables{more}.")
    if unread := [each.name for each in library.variables if not each.readers]:
        yield ""
        yield from _wrapped(f"Nothing reads: {_code(unread)}.")
    if library.gone:
        gone = ", ".join(f"`{name}` ({until})" for name, until in library.gone.items())
        yield ""
        yield from _wrapped(f"No longer read since the version in brackets: {gone}.")


def _variable_lines(variable: EnvironmentVariable) -> Iterator[str]:
    """One variable: what it does, then its values, versions and harmful values, one line each."""
    if variable.readers:
        yield from _wrapped(variable.does)
    else:
        meant = f"`{variable.renamed}`" if variable.renamed else variable.instead
        yield from _wrapped(f"**Nothing reads it.** {variable.does} Instead: {meant}.")
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
