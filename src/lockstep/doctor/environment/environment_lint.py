"""Findings about the environments of one or more processes. Pure."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from lockstep.base.secrets import HIDDEN, is_secret_name, secret_kind
from lockstep.base.text import summarize_list
from lockstep.doctor.environment.variable_table import (
    EnvironmentVariable,
    HarmfulValue,
    KnownVariable,
    LauncherForwarding,
    LibraryVariables,
    VariableConflict,
    VariableTable,
    load_variables,
    version_reached,
)
from lockstep.doctor.environment.variable_values import edit_distance, nearest_name, value_matches, value_problem
from lockstep.doctor.output.findings import Finding, Severity

SHELL_ROLE = "shell"
"""The role of the environment that a job is started from."""
_LONGEST = 60
"""Characters of a value that are shown."""
_LONGEST_NAME = 120
"""Nobody reads a longer one."""
_NAMED = 4


@dataclass(frozen=True, slots=True)
class ProcessEnvironment:
    """An environment."""

    host: str
    variables: Mapping[str, str]
    role: str = ""
    """`shell` for where the job is started; else whose it is."""

    @property
    def who(self) -> str:
        return " ".join(part for part in (self.host, self.role if self.role != SHELL_ROLE else "") if part)


@dataclass(frozen=True, slots=True)
class JobTraits:
    """What is known of the job that has these environments."""

    several: bool | None = None
    """Whether it has more than one host; None where that is not known."""
    cuda: bool = False
    """Whether it is to use GPUs."""
    gpus: tuple[str, ...] = ()
    """Names of the GPUs of its host, as far as they are known."""


@dataclass(frozen=True)
class LintRequest:
    """What is looked at, and with what knowledge."""

    places: Sequence[ProcessEnvironment]
    versions: Mapping[str, str] = field(default_factory=dict)
    """Of libraries, as the data files name them: `nccl_choice`, `torch`, `vllm_choice`. Without one nothing is said
    of versions."""
    launcher: str | None = None
    """How workers on other hosts are started, see `launchers.yaml`."""
    table: VariableTable = field(default_factory=load_variables)
    job: JobTraits = JobTraits()


def lint_environments(
    places: Iterable[ProcessEnvironment],
    versions: Mapping[str, str] | None = None,
    launcher: str | None = None,
    table: VariableTable | None = None,
    job: JobTraits | None = None,
) -> list[Finding]:
    """What is wrong, or worth to know, with these environments; one `ok` where nothing is.

    Raises:
        ValueError: For a launcher that is not known.
    """
    asked = LintRequest(tuple(places), versions or {}, launcher, table or load_variables(), job or JobTraits())
    if launcher or len({place.host for place in asked.places if place.host}) > 1:
        asked = replace(asked, job=replace(asked.job, several=True))
    if launcher is not None and launcher not in asked.table.launchers:
        raise ValueError(f"launcher {launcher!r} is not known, only {', '.join(sorted(asked.table.launchers))}")
    found = [*_merge_equal(_judge_environments(asked)), *_judge_between_hosts(asked), *_judge_not_forwarded(asked)]
    if not any(each.severity in ("error", "warning") for each in found):
        count = len({name for place in asked.places for name in place.variables if name in asked.table.names})
        text = f"{count} variables that libraries read are set, and nothing is wrong with them"
        found.append(Finding("env-fine", "ok", "", text))
    return found


def format_assignment(name: str, value: str, table: VariableTable) -> str:
    """`NAME=value`; the value is hidden where the variable is not known, or where it is or looks like a secret."""
    known = table.known.get(name)
    hide = known is None or known.variable.secret or is_secret_name(name) or secret_kind(value) is not None
    text = HIDDEN if hide and value else value
    return f"{name}={text if len(text) <= _LONGEST else text[:_LONGEST] + '...'}"


# ---------------------------------------------------------------- in one environment


def _judge_environments(asked: LintRequest) -> Iterator[tuple[Finding, str]]:
    """Each finding with whose it is. Places that have the same values of what matters are looked at once."""
    known = asked.table.known
    names = {name for place in asked.places for name in place.variables}
    unknown = {name: tuple(_judge_unknown(name, asked)) for name in names if name not in known}
    matter = {name for name in names if name in known or unknown[name]}
    seen: dict[tuple[tuple[str, str], ...], tuple[Finding, ...]] = {}
    for place in asked.places:
        values = tuple(sorted(pair for pair in place.variables.items() if pair[0] in matter))
        if values not in seen:
            of_each = (_judge_known(known[n], v, place, asked) if n in known else unknown[n] for n, v in values)
            seen[values] = tuple(finding for each in of_each for finding in each)
        yield from ((finding, place.who) for finding in seen[values])


def _judge_known(known: KnownVariable, value: str, place: ProcessEnvironment, asked: LintRequest) -> Iterator[Finding]:
    variable = known.variable
    dead = list(_judge_unread(known, value, asked))
    installed = asked.versions.get(known.library.library)
    harms = [harm for harm in variable.left_on if _applies(harm, value, installed, asked.job)]
    unread = any(each.id in ("env-unread", "env-gone") for each in dead)
    if unread or not harms:  # one finding for a variable that is better unset: its new name would be so, too
        yield from dead
    if unread:
        return  # what nobody reads contradicts nothing, and no value of it is bad
    if problem := value_problem(variable, value):
        why = variable.bad or _value_problem_text(variable, problem)
        seen = f"{format_assignment(variable.name, value, asked.table)} is not {problem}"
        yield _finding("env-value", variable.bad_severity, seen, why, "", variable)
    for harm in harms:
        yield _harm_finding(known, value, harm, bool(dead), asked)
    for conflict in variable.conflicts:
        other = place.variables.get(conflict.other)
        if other is not None and value_matches(value, conflict.when) and value_matches(other, conflict.other_when):
            yield _conflict_finding(variable, value, other, conflict, asked)


def _judge_unread(known: KnownVariable, value: str, asked: LintRequest) -> Iterator[Finding]:
    """Unread, renamed, not yet or not any more."""
    variable, library = known.variable, known.library
    installed = asked.versions.get(library.library)
    seen = format_assignment(variable.name, value, asked.table)
    if not variable.readers:
        fix = f"set {variable.renamed}" if variable.renamed else variable.instead
        yield _finding("env-unread", "warning", f"{seen} is read by nobody", variable.does, fix, variable)
        return
    gone = version_reached(installed, variable.until)
    if gone or (gone is None and variable.until is not None):
        yield _removed_finding(variable, library.title, seen, installed)
        return
    if variable.renamed is not None and version_reached(installed, variable.renamed_since) is not False:
        since = f" since {library.title} {variable.renamed_since}" if variable.renamed_since else ""
        text = f"{seen}: the name is now {variable.renamed}{since}"
        yield _finding("env-renamed", "note", text, variable.does, f"set {variable.renamed} instead", variable)
    elif version_reached(installed, variable.since) is False:
        text = f"{seen}: read since {library.title} {variable.since}, and {installed} is installed"
        yield _finding("env-unread", "warning", text, variable.does, f"unset {variable.name}", variable)


def _removed_finding(variable: EnvironmentVariable, title: str, seen: str, installed: str | None) -> Finding:
    fix = f"set {variable.renamed} instead" if variable.renamed else variable.instead or f"unset {variable.name}"
    if installed is None:
        text = f"{seen}: not read since {title} {variable.until}"
        return _finding("env-gone", "warning", text, variable.does, fix, variable)
    text = f"{seen}: not read since {title} {variable.until}, and {installed} is installed"
    return _finding("env-gone", "warning", text, variable.does, fix, variable)


def _judge_long_removed(name: str, library: LibraryVariables, asked: LintRequest) -> Iterator[Finding]:
    installed, until = asked.versions.get(library.library), library.gone[name]
    if version_reached(installed, until) is not False:
        told = "" if installed is None else f", and {installed} is installed"
        seen = f"{name}: not read since {library.title} {until}{told}"
        why = "What it settled is settled otherwise today, or not at all."
        yield Finding("env-gone", "warning", "", seen, why, f"unset {name}", library.names_source or "")


def _judge_unknown(name: str, asked: LintRequest) -> Iterator[Finding]:
    """A slip in a name, within the names that belong to a library: users' own are left alone."""
    table = asked.table
    if len(name) > _LONGEST_NAME:
        return
    library = table.library_of(name)
    if library is not None and name in library.gone:
        yield from _judge_long_removed(name, library, asked)
    if name in table.names or table.free(name):
        return
    if library is not None:
        mates = frozenset(each for each in table.names if table.library_of(each) is library)
        near = nearest_name(name, mates, len(table.prefix_of(name)))
        source = library.names_source or ""
        if near is not None:
            seen = f"{name} is read by nobody: {near} is meant?"
            why = f"{library.title} has no variable of this name, so what is set has no effect."
            source = _source(table, near) or source
            yield Finding("env-misspelt", "error", "", seen, why, f"rename it to {near}", source)
            return
        if library.shared:
            return
        seen = f"{name} is in no list of {library.title}'s variables"
        why = f"Names that begin so are {library.title}'s; those of {library.read} were looked through."
        yield Finding("env-unknown", "note", "", seen, why, f"unset {name}, unless a plug-in reads it", source)
    elif (near := _prefix_slip(name, table)) is not None:
        seen = f"{name} is read by nobody: {near} is meant?"
        why = "A variable with a slip in its first letters has no effect."
        yield Finding("env-misspelt", "error", "", seen, why, f"rename it to {near}", _source(table, near))


def _prefix_slip(name: str, table: VariableTable) -> str | None:
    """`NCLL_DEBUG`, `nccl_debug`: a known name but for one or two letters swapped or another case."""
    upper = name.upper()
    if upper != name and (found := next((each for each in table.names if each.upper() == upper), None)) is not None:
        return found if table.library_of(found) is not None else None
    begin, _, rest = name.partition("_")
    if len(begin) < 4 or not rest:
        return None
    # Of the same letters: HCCL and RCCL have variables of their own.
    begins = {prefix.partition("_")[0] for library in table.libraries for prefix in library.prefixes}
    near = (each for each in begins if set(each) == set(begin) and edit_distance(each, begin, 1) == 1)
    return next((f"{each}_{rest}" for each in near if f"{each}_{rest}" in table.names), None)


def _applies(harm: HarmfulValue, value: str, installed: str | None, job: JobTraits) -> bool:
    def there(names: str) -> bool:
        return any(re.search(names, name) for name in job.gpus)

    if (harm.gpus and not there(harm.gpus)) or (harm.not_gpus and there(harm.not_gpus)):
        return False
    return value_matches(value, harm.when) and version_reached(installed, harm.since) is not False


def _harm_finding(known: KnownVariable, value: str, harm: HarmfulValue, renamed: bool, asked: LintRequest) -> Finding:
    variable = known.variable
    seen = format_assignment(variable.name, value, asked.table)
    if renamed:
        since = f"since {known.library.title} {variable.renamed_since} " if variable.renamed_since else "today "
        seen += f" ({since}{variable.renamed})"
    fix = harm.fix or f"unset {variable.name} when the fault is found"
    severity = _harm_severity(harm, asked.job)
    fits = severity == "note" and harm.severity != "note" and harm.where == "several"
    return _finding("env-left-on", severity, seen, harm.why, "" if fits else fix, variable)


def _harm_severity(harm: HarmfulValue, job: JobTraits) -> Severity:
    """What is right on one host, or where no GPU is to be used, is a note there; a warning where that is not known."""
    holds = {None: True, "several": job.several, "cuda": job.cuda}[harm.where]
    if holds is None and harm.severity == "error":
        return "warning"
    return "note" if holds is False else harm.severity


def _conflict_finding(
    variable: EnvironmentVariable, value: str, other: str, conflict: VariableConflict, asked: LintRequest
) -> Finding:
    seen = f"{format_assignment(variable.name, value, asked.table)} with {format_assignment(conflict.other, other, asked.table)}"
    fix = conflict.fix or f"unset one of {variable.name} and {conflict.other}"
    return _finding("env-conflict", conflict.severity, seen, conflict.why, fix, variable)


def _finding(id: str, severity: Severity, seen: str, why: str, fix: str, variable: EnvironmentVariable) -> Finding:
    return Finding(id, severity, "", seen, why, fix, variable.sources[0])


def _value_problem_text(variable: EnvironmentVariable, problem: str) -> str:
    if variable.kind == "flag":
        return "It is read as a number: a word such as `true` counts as 0."
    return f"{_readers(variable)} takes {problem}."


def _readers(variable: EnvironmentVariable) -> str:
    return " and ".join(variable.readers)


def _source(table: VariableTable, name: str) -> str:
    known = table.known.get(name)
    return known.variable.sources[0] if known is not None else ""


def _merge_equal(told: Iterable[tuple[Finding, str]]) -> Iterator[Finding]:
    """Equal findings of several places as one."""
    places: dict[Finding, list[str]] = {}
    for finding, who in told:
        places.setdefault(finding, []).append(who)
    for finding, who_all in places.items():
        yield replace(finding, host=_names_text([each for each in who_all if each]))


def _names_text(who: Sequence[str]) -> str:
    return summarize_list(list(dict.fromkeys(who)), _NAMED)


# ---------------------------------------------------------------- between environments


def _judge_between_hosts(asked: LintRequest) -> Iterator[Finding]:
    """Variables that differ between hosts and are known to belong together."""
    by_role: dict[str, list[ProcessEnvironment]] = {}
    for place in asked.places:
        by_role.setdefault(place.role, []).append(place)
    for role, places in by_role.items():
        if role != SHELL_ROLE and len({place.host for place in places}) > 1:
            yield from _differing_values(places, asked)


def _differing_values(places: Sequence[ProcessEnvironment], asked: LintRequest) -> Iterator[Finding]:
    for name in sorted({name for place in places for name in place.variables}):
        known = asked.table.known.get(name)
        if known is None or known.variable.differs == "expected" or not known.variable.readers:
            continue
        values: dict[str | None, list[str]] = {}
        for place in places:
            values.setdefault(place.variables.get(name), []).append(place.who)
        if len(values) > 1:
            parts = [_value_on(name, value, who, asked.table) for value, who in values.items()]
            fix = f"set {name} to the same on all hosts"
            seen = f"{name} differs: {'; '.join(parts)}"
            yield Finding(
                "env-differs", known.variable.differs, _names_text([place.who for place in places]), seen,
                known.variable.does, fix, known.variable.sources[0],
            )  # fmt: skip


def _value_on(name: str, value: str | None, who: Sequence[str], table: VariableTable) -> str:
    return f"{'not set' if value is None else format_assignment(name, value, table)} on {_names_text(who)}"


def _judge_not_forwarded(asked: LintRequest) -> Iterator[Finding]:
    """What is set where the job is started, and does not arrive where it is read."""
    shells = [place for place in asked.places if place.role == SHELL_ROLE]
    workers = [place for place in asked.places if place.role != SHELL_ROLE]
    for shell in shells:
        if workers:
            yield from _missing_on_workers(shell, workers, asked)
        elif asked.launcher is not None:
            yield from _not_forwarded(shell, asked.table.launchers[asked.launcher], asked.table)


def _missing_on_workers(
    shell: ProcessEnvironment, workers: Sequence[ProcessEnvironment], asked: LintRequest
) -> Iterator[Finding]:
    for name, known in _variables_for_workers(shell, asked.table):
        lacking = [place.who for place in workers if name not in place.variables]
        if lacking:
            seen = f"{format_assignment(name, shell.variables[name], asked.table)} of the shell is not set on {_names_text(lacking)}"
            launcher = asked.table.launchers.get(asked.launcher or "")
            fix = launcher.fix if launcher else f"set {name} on every host, or have the launcher pass it on"
            yield Finding(
                "env-not-seen", "warning", _names_text(lacking), seen, known.variable.does, fix.format(name=name),
                known.variable.sources[0],
            )  # fmt: skip


def _not_forwarded(shell: ProcessEnvironment, launcher: LauncherForwarding, table: VariableTable) -> Iterator[Finding]:
    names = [name for name, _ in _variables_for_workers(shell, table) if not _matches(name, launcher.forwards)]
    if names:
        seen = f"{summarize_list(names, _NAMED)} {'is' if len(names) == 1 else 'are'} set in this shell and will not reach workers"
        yield Finding(
            "env-not-seen", "warning", shell.host, f"{seen} on other hosts ({launcher.title})", launcher.why,
            launcher.fix.format(name=names[0]), launcher.sources[0],
        )  # fmt: skip


def _variables_for_workers(shell: ProcessEnvironment, table: VariableTable) -> Iterator[tuple[str, KnownVariable]]:
    """Variables of a shell that workers read and that are alike on all hosts."""
    for name in sorted(shell.variables):
        known = table.known.get(name)
        if known is not None and known.variable.readers and known.variable.differs != "expected":
            yield name, known


def _matches(name: str, patterns: Iterable[str]) -> bool:
    fits: Callable[[str], bool] = lambda each: name.startswith(each[:-1]) if each.endswith("*") else name == each  # noqa: E731
    return any(fits(each) for each in patterns)
