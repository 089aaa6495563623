"""The page about variables as Markdown, from the data files: `python -m lockstep.doctor.environment.reference`."""

import sys
from collections.abc import Iterator

from lockstep.doctor.environment.schema import Launcher, Library, Variable, When
from lockstep.doctor.environment.variables import Table, load

_INTRODUCTION = """\
# Variables, and what they really do

Much advice sets variables that nothing reads, that were renamed, that contradict each other, or that were meant for an
hour of debugging and slow every run since. `lockstep check --env` looks at the environment of the shell (and at NCCL's
own files, `/etc/nccl.conf` and `~/.nccl.conf`) and says so, with what to do and who says that. It is part of
`lockstep check`, and of every incident: `findings.json` in its folder, the report of the run, and `lockstep explain`
of the incident say what was odd about the environment of the processes.

`lockstep check --env-file FILE` looks at a text in place of the shell: `export` lines, the output of `env`, `docker run
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

The tables are made from data files (`python -m lockstep.doctor.environment.reference`); each statement names the
documentation or the source that it was checked against. A variable that is in no table here may still be known by name.
"""


def reference(table: Table | None = None) -> str:
    """The whole page."""
    table = table or load()
    lines = [_INTRODUCTION, "## How variables reach workers", "", *_launchers(table)]
    for library in table.libraries:
        lines += ["", f"## {library.title[0].upper()}{library.title[1:]}", "", *_about(library), *_table(library)]
    return "\n".join(lines) + "\n"


def _launchers(table: Table) -> Iterator[str]:
    yield "| `--launcher` | passes on | why | to pass a variable on |"
    yield "|---|---|---|---|"
    for each in table.launchers.values():
        yield _row(
            f"`{each.name}`", _forwards(each), f"{each.why} {_links(each.sources)}", each.fix.format(name="NAME")
        )


def _forwards(launcher: Launcher) -> str:
    return ", ".join(f"`{each}`" for each in launcher.forwards) or "nothing"


def _about(library: Library) -> Iterator[str]:
    more = f", and {len(library.names)} more by name" if library.names else ""
    yield f"Looked through: {library.read}. {len(library.variables)} variables{more}."
    yield ""
    if library.gone:
        gone = ", ".join(f"`{name}` ({until})" for name, until in library.gone.items())
        yield f"Not read any more since the version in brackets: {gone}."
        yield ""


def _table(library: Library) -> Iterator[str]:
    yield "| variable | what it does | values | versions | when it hurts |"
    yield "|---|---|---|---|---|"
    for each in library.variables:
        use = f" For: {each.use}" if each.use else ""
        yield _row(f"`{each.name}`", f"{_read(each)}{each.does}{use} {_links(each.sources)}", _values(each),
                   _versions(each), _hurts(each))  # fmt: skip


def _read(variable: Variable) -> str:
    if not variable.readers:
        meant = f"`{variable.renamed}`" if variable.renamed else variable.instead
        return f"**Read by nobody**; instead: {meant}. "
    return ""


def _values(variable: Variable) -> str:
    kinds = {"flag": "0 or 1", "boolean": "true or false", "integer": "whole number", "choices": "list"}
    listed = ", ".join(f"`{each}`" for each in variable.values if each)
    low, high = variable.range or (None, None)
    bounds = [f"{sign} {limit:.15g}" for sign, limit in ((">=", low), ("<=", high)) if limit is not None]
    kind = "" if variable.kind in ("choice", "text") else kinds.get(variable.kind, variable.kind)
    parts = [part for part in (kind, listed, " and ".join(bounds)) if part]
    return "; ".join([*parts, *([f"default `{variable.default}`"] if variable.default else [])])


def _versions(variable: Variable) -> str:
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


def _hurts(variable: Variable) -> str:
    parts = [variable.hurts, *(f"{_when(each.when)}: {each.why}" for each in variable.left_on)]
    parts += [f"With `{each.other}` ({_when(each.other_when)}): {each.why}" for each in variable.conflicts]
    return " ".join(part for part in parts if part)


def _when(when: When) -> str:
    words = {"set": "any value", "on": "on", "off": "off", "empty": "empty"}
    several = (when,) if isinstance(when, str) else when
    return " or ".join(words.get(each, "some values" if each[0] == "~" else f"`{each}`") for each in several)


def _links(sources: tuple[str, ...]) -> str:
    pages = (each.removeprefix("docs/") for each in sources)
    return " ".join(f"<{each}>" if "://" in each else f"[{each}]({each})" for each in pages)


def _row(*cells: str) -> str:
    return f"| {' | '.join(' '.join(cell.split()).replace('|', chr(92) + '|') for cell in cells)} |"


if __name__ == "__main__":
    sys.stdout.write(reference())
