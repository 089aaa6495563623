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
"""Role of the environment in which a job is started."""
_LONGEST = 60
"""Maximum number of characters of a value that are shown."""
_LONGEST_NAME = 120
"""Maximum length of a judged name."""
_NAMED = 4


@dataclass(frozen=True, slots=True)
class ProcessEnvironment:
    """Environment variables of a process."""

    host: str
    variables: Mapping[str, str]
    role: str = ""
    """`shell` for the environment in which the job is started, else the process's role."""

    @property
    def label(self) -> str:
        return " ".join(part for part in (self.host, self.role if self.role != SHELL_ROLE else "") if part)


@dataclass(frozen=True, slots=True)
class JobTraits:
    """What is known about the job that runs with these environments."""

    several: bool | None = None
    """Whether it has several hosts; None if not known."""
    cuda: bool = False
    """Whether it will use GPUs."""
    gpus: tuple[str, ...] = ()
    """Names of its host's GPUs, as far as known."""


@dataclass(frozen=True)
class LintRequest:
    """Environments to judge, with the knowledge to judge them by."""

    environments: Sequence[ProcessEnvironment]
    versions: Mapping[str, str] = field(default_factory=dict)
    """Versions of libraries by their name in the data files: `nccl`, `torch`, `vllm`. Without a version, no finding
    depends on it."""
    launcher: str | None = None
    """Launcher of workers on other hosts, see `launchers.yaml`."""
    table: VariableTable = field(default_factory=load_variables)
    job: JobTraits = JobTraits()


def lint_environments(
    environments: Iterable[ProcessEnvironment],
    versions: Mapping[str, str] | None = None,
    launcher: str | None = None,
    table: VariableTable | None = None,
    job: JobTraits | None = None,
) -> list[Finding]:
    """Findings about these environments; one `ok` if nothing is wrong.

    Raises:
        ValueError: the launcher is unknown.
    """
    request = LintRequest(tuple(environments), versions or {}, launcher, table or load_variables(), job or JobTraits())
    if launcher or len({environment.host for environment in request.environments if environment.host}) > 1:
        request = replace(request, job=replace(request.job, several=True))
    if launcher is not None and launcher not in request.table.launchers:
        raise ValueError(f"unknown launcher {launcher!r}: expected one of {', '.join(sorted(request.table.launchers))}")
    found = [
        *_merge_equal(_judge_environments(request)),
        *_judge_between_hosts(request),
        *_judge_not_forwarded(request),
    ]
    if not any(each.severity in ("error", "warning") for each in found):
        count = len(
            {
                name
                for environment in request.environments
                for name in environment.variables
                if name in request.table.names
            }
        )
        text = f"{count} variables that libraries read are set, without a problem"
        found.append(Finding("env-fine", "ok", "", text))
    return found


def format_assignment(name: str, value: str, table: VariableTable) -> str:
    """`NAME=value`; the value is hidden if the variable is unknown, or if it is or looks like a secret."""
    known = table.known.get(name)
    hide = known is None or known.variable.secret or is_secret_name(name) or secret_kind(value) is not None
    text = HIDDEN if hide and value else value
    return f"{name}={text if len(text) <= _LONGEST else text[:_LONGEST] + '...'}"


def _judge_environments(request: LintRequest) -> Iterator[tuple[Finding, str]]:
    """Each finding with the environment it is about. Environments with equal relevant values are judged once."""
    known = request.table.known
    names = {name for environment in request.environments for name in environment.variables}
    unknown = {name: tuple(_judge_unknown(name, request)) for name in names if name not in known}
    matter = {name for name in names if name in known or unknown[name]}
    seen: dict[tuple[tuple[str, str], ...], tuple[Finding, ...]] = {}
    for environment in request.environments:
        values = tuple(sorted(pair for pair in environment.variables.items() if pair[0] in matter))
        if values not in seen:
            of_each = (_judge_known(known[n], v, environment, request) if n in known else unknown[n] for n, v in values)
            seen[values] = tuple(finding for each in of_each for finding in each)
        yield from ((finding, environment.label) for finding in seen[values])


def _judge_known(
    known: KnownVariable, value: str, environment: ProcessEnvironment, request: LintRequest
) -> Iterator[Finding]:
    variable = known.variable
    dead = list(_judge_unread(known, value, request))
    installed = request.versions.get(known.library.library)
    harms = [harm for harm in variable.left_on if _applies(harm, value, installed, request.job)]
    unread = any(each.id in ("env-unread", "env-gone") for each in dead)
    if unread or not harms:  # one finding per variable: one that should be unset needs no hint to its new name
        yield from dead
    if unread:
        return  # a variable that nothing reads has neither conflicts nor bad values
    if problem := value_problem(variable, value):
        why = variable.bad or _value_problem_text(variable, problem)
        seen = f"{format_assignment(variable.name, value, request.table)} is not {problem}"
        yield _finding("env-value", variable.bad_severity, seen, why, "", variable)
    for harm in harms:
        yield _harm_finding(known, value, harm, bool(dead), request)
    for conflict in variable.conflicts:
        other = environment.variables.get(conflict.other)
        if other is not None and value_matches(value, conflict.when) and value_matches(other, conflict.other_when):
            yield _conflict_finding(variable, value, other, conflict, request)


def _judge_unread(known: KnownVariable, value: str, request: LintRequest) -> Iterator[Finding]:
    """Reports variables that are unread, renamed, not read yet, or no longer read."""
    variable, library = known.variable, known.library
    installed = request.versions.get(library.library)
    seen = format_assignment(variable.name, value, request.table)
    if not variable.readers:
        fix = f"set {variable.renamed}" if variable.renamed else variable.instead
        yield _finding("env-unread", "warning", f"nothing reads {seen}", variable.does, fix, variable)
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
        text = f"{seen}: read since {library.title} {variable.since}, but {installed} is installed"
        yield _finding("env-unread", "warning", text, variable.does, f"unset {variable.name}", variable)


def _removed_finding(variable: EnvironmentVariable, title: str, seen: str, installed: str | None) -> Finding:
    fix = f"set {variable.renamed} instead" if variable.renamed else variable.instead or f"unset {variable.name}"
    if installed is None:
        text = f"{seen}: no longer read since {title} {variable.until}"
        return _finding("env-gone", "warning", text, variable.does, fix, variable)
    text = f"{seen}: no longer read since {title} {variable.until}, and {installed} is installed"
    return _finding("env-gone", "warning", text, variable.does, fix, variable)


def _judge_long_removed(name: str, library: LibraryVariables, request: LintRequest) -> Iterator[Finding]:
    installed, until = request.versions.get(library.library), library.gone[name]
    if version_reached(installed, until) is not False:
        version_text = "" if installed is None else f", and {installed} is installed"
        seen = f"{name}: no longer read since {library.title} {until}{version_text}"
        why = "Its purpose is served otherwise today, or not at all."
        yield Finding("env-gone", "warning", "", seen, why, f"unset {name}", library.names_source or "")


def _judge_unknown(name: str, request: LintRequest) -> Iterator[Finding]:
    """Reports misspelt names that belong to a library by their prefix; other names are the user's."""
    table = request.table
    if len(name) > _LONGEST_NAME:
        return
    library = table.library_of(name)
    if library is not None and name in library.gone:
        yield from _judge_long_removed(name, library, request)
    if name in table.names or table.free(name):
        return
    if library is not None:
        mates = frozenset(each for each in table.names if table.library_of(each) is library)
        near = nearest_name(name, mates, len(table.prefix_of(name)))
        source = library.names_source or ""
        if near is not None:
            seen = f"nothing reads {name}. Did you mean {near}?"
            why = f"{library.title} has no variable of this name, so it has no effect."
            source = _source(table, near) or source
            yield Finding("env-misspelt", "error", "", seen, why, f"rename it to {near}", source)
            return
        if library.shared:
            return
        seen = f"{name} is not in any list of {library.title}'s variables"
        why = f"Names with this prefix belong to {library.title}; its variables were listed from {library.read}."
        yield Finding("env-unknown", "note", "", seen, why, f"unset {name}, unless a plug-in reads it", source)
    elif (near := _prefix_slip(name, table)) is not None:
        seen = f"nothing reads {name}. Did you mean {near}?"
        why = "A variable with a misspelt prefix has no effect."
        yield Finding("env-misspelt", "error", "", seen, why, f"rename it to {near}", _source(table, near))


def _prefix_slip(name: str, table: VariableTable) -> str | None:
    """`NCLL_DEBUG`, `nccl_debug`: a known name except for one or two swapped letters or its case."""
    upper = name.upper()
    if upper != name and (found := next((each for each in table.names if each.upper() == upper), None)) is not None:
        return found if table.library_of(found) is not None else None
    begin, _, rest = name.partition("_")
    if len(begin) < 4 or not rest:
        return None
    # Only the same letters: HCCL and RCCL have variables of their own.
    begins = {prefix.partition("_")[0] for library in table.libraries for prefix in library.prefixes}
    near = (each for each in begins if set(each) == set(begin) and edit_distance(each, begin, 1) == 1)
    return next((f"{each}_{rest}" for each in near if f"{each}_{rest}" in table.names), None)


def _applies(harm: HarmfulValue, value: str, installed: str | None, job: JobTraits) -> bool:
    def there(names: str) -> bool:
        return any(re.search(names, name) for name in job.gpus)

    if (harm.gpus and not there(harm.gpus)) or (harm.not_gpus and there(harm.not_gpus)):
        return False
    return value_matches(value, harm.when) and version_reached(installed, harm.since) is not False


def _harm_finding(known: KnownVariable, value: str, harm: HarmfulValue, renamed: bool, request: LintRequest) -> Finding:
    variable = known.variable
    seen = format_assignment(variable.name, value, request.table)
    if renamed:
        since = f"since {known.library.title} {variable.renamed_since} " if variable.renamed_since else "today "
        seen += f" ({since}{variable.renamed})"
    fix = harm.fix or f"unset {variable.name} when debugging is done"
    severity = _harm_severity(harm, request.job)
    fits = severity == "note" and harm.severity != "note" and harm.where == "several"
    return _finding("env-left-on", severity, seen, harm.why, "" if fits else fix, variable)


def _harm_severity(harm: HarmfulValue, job: JobTraits) -> Severity:
    """A value that is fine on one host, or without GPUs, is a note there; a warning if that is not known."""
    holds = {None: True, "several": job.several, "cuda": job.cuda}[harm.where]
    if holds is None and harm.severity == "error":
        return "warning"
    return "note" if holds is False else harm.severity


def _conflict_finding(
    variable: EnvironmentVariable, value: str, other: str, conflict: VariableConflict, request: LintRequest
) -> Finding:
    seen = (
        f"{format_assignment(variable.name, value, request.table)} with "
        f"{format_assignment(conflict.other, other, request.table)}"
    )
    fix = conflict.fix or f"unset one of {variable.name} and {conflict.other}"
    return _finding("env-conflict", conflict.severity, seen, conflict.why, fix, variable)


def _finding(id: str, severity: Severity, seen: str, why: str, fix: str, variable: EnvironmentVariable) -> Finding:
    return Finding(id, severity, "", seen, why, fix, variable.sources[0])


def _value_problem_text(variable: EnvironmentVariable, problem: str) -> str:
    if variable.kind == "flag":
        return "It is parsed as a number: a word such as `true` counts as 0."
    return f"{_readers(variable)} expects {problem}."


def _readers(variable: EnvironmentVariable) -> str:
    return " and ".join(variable.readers)


def _source(table: VariableTable, name: str) -> str:
    known = table.known.get(name)
    return known.variable.sources[0] if known is not None else ""


def _merge_equal(findings: Iterable[tuple[Finding, str]]) -> Iterator[Finding]:
    """Merges equal findings of several environments."""
    environments: dict[Finding, list[str]] = {}
    for finding, labels in findings:
        environments.setdefault(finding, []).append(labels)
    for finding, all_labels in environments.items():
        yield replace(finding, host=_names_text([each for each in all_labels if each]))


def _names_text(labels: Sequence[str]) -> str:
    return summarize_list(list(dict.fromkeys(labels)), _NAMED)


def _judge_between_hosts(request: LintRequest) -> Iterator[Finding]:
    """Reports variables that must agree between hosts and differ."""
    by_role: dict[str, list[ProcessEnvironment]] = {}
    for environment in request.environments:
        by_role.setdefault(environment.role, []).append(environment)
    for role, environments in by_role.items():
        if role != SHELL_ROLE and len({environment.host for environment in environments}) > 1:
            yield from _differing_values(environments, request)


def _differing_values(environments: Sequence[ProcessEnvironment], request: LintRequest) -> Iterator[Finding]:
    for name in sorted({name for environment in environments for name in environment.variables}):
        known = request.table.known.get(name)
        if known is None or known.variable.differs == "expected" or not known.variable.readers:
            continue
        values: dict[str | None, list[str]] = {}
        for environment in environments:
            values.setdefault(environment.variables.get(name), []).append(environment.label)
        if len(values) > 1:
            parts = [_value_on(name, value, labels, request.table) for value, labels in values.items()]
            fix = f"set {name} to the same value on all hosts"
            seen = f"{name} differs: {'; '.join(parts)}"
            yield Finding(
                "env-differs", known.variable.differs, _names_text([each.label for each in environments]), seen,
                known.variable.does, fix, known.variable.sources[0],
            )  # fmt: skip


def _value_on(name: str, value: str | None, labels: Sequence[str], table: VariableTable) -> str:
    return f"{'not set' if value is None else format_assignment(name, value, table)} on {_names_text(labels)}"


def _judge_not_forwarded(request: LintRequest) -> Iterator[Finding]:
    """Reports variables that are set where the job is started, but do not reach their readers."""
    shells = [environment for environment in request.environments if environment.role == SHELL_ROLE]
    workers = [environment for environment in request.environments if environment.role != SHELL_ROLE]
    for shell in shells:
        if workers:
            yield from _missing_on_workers(shell, workers, request)
        elif request.launcher is not None:
            yield from _not_forwarded(shell, request.table.launchers[request.launcher], request.table)


def _missing_on_workers(
    shell: ProcessEnvironment, workers: Sequence[ProcessEnvironment], request: LintRequest
) -> Iterator[Finding]:
    for name, known in _variables_for_workers(shell, request.table):
        lacking = [environment.label for environment in workers if name not in environment.variables]
        if lacking:
            seen = (
                f"{format_assignment(name, shell.variables[name], request.table)} of the shell is not set on "
                f"{_names_text(lacking)}"
            )
            launcher = request.table.launchers.get(request.launcher or "")
            fix = launcher.fix if launcher else f"set {name} on every host, or make the launcher forward it"
            yield Finding(
                "env-not-seen", "warning", _names_text(lacking), seen, known.variable.does, fix.format(name=name),
                known.variable.sources[0],
            )  # fmt: skip


def _not_forwarded(shell: ProcessEnvironment, launcher: LauncherForwarding, table: VariableTable) -> Iterator[Finding]:
    names = [name for name, _ in _variables_for_workers(shell, table) if not _matches(name, launcher.forwards)]
    if names:
        seen = (
            f"{summarize_list(names, _NAMED)} {'is' if len(names) == 1 else 'are'} set in this shell but will not "
            "reach "
            "workers"
        )
        yield Finding(
            "env-not-seen", "warning", shell.host, f"{seen} on other hosts ({launcher.title})", launcher.why,
            launcher.fix.format(name=names[0]), launcher.sources[0],
        )  # fmt: skip


def _variables_for_workers(shell: ProcessEnvironment, table: VariableTable) -> Iterator[tuple[str, KnownVariable]]:
    """Variables of a shell that workers read and that should be equal on all hosts."""
    for name in sorted(shell.variables):
        known = table.known.get(name)
        if known is not None and known.variable.readers and known.variable.differs != "expected":
            yield name, known


def _matches(name: str, patterns: Iterable[str]) -> bool:
    fits: Callable[[str], bool] = lambda each: name.startswith(each[:-1]) if each.endswith("*") else name == each  # noqa: E731
    return any(fits(each) for each in patterns)
