"""Checks the environment variables of one or more processes."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from lockstep.base.secrets import HIDDEN, is_secret_name, secret_kind
from lockstep.base.text import count_noun, summarize_list
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
"""The role of the environment in which a job is started."""
_MAX_VALUE_CHARS = 60
"""Maximum number of characters of a value that are shown."""
_MAX_NAME_CHARS = 120
"""Longer names are not checked."""
_MAX_LISTED = 4
"""Maximum number of names listed before "and N more"."""


@dataclass(frozen=True, slots=True)
class ProcessEnvironment:
    """The environment variables of a process."""

    host: str
    variables: Mapping[str, str]
    role: str = ""
    """The role of the process; `shell` for the environment in which the job is started."""

    @property
    def label(self) -> str:
        """Host and role, as findings name them."""
        return " ".join(part for part in (self.host, self.role if self.role != SHELL_ROLE else "") if part)


@dataclass(frozen=True, slots=True)
class JobTraits:
    """Properties of the job that runs with these environments."""

    multi_host: bool | None = None
    """Whether the job has several hosts; None if that is not known."""
    cuda: bool = False
    """Whether the job uses GPUs."""
    gpus: tuple[str, ...] = ()
    """The names of the host's GPUs, as far as known."""


@dataclass(frozen=True)
class LintRequest:
    """The environments to check, and what is known about libraries, launcher and job."""

    environments: Sequence[ProcessEnvironment]
    versions: Mapping[str, str] = field(default_factory=dict)
    """The versions of libraries by the names of the data files: `nccl`, `torch`, `vllm`. The findings about a library
    without a version do not depend on the version."""
    launcher: str | None = None
    """The launcher of workers on other hosts, see `launchers.yaml`."""
    table: VariableTable = field(default_factory=load_variables)
    job: JobTraits = JobTraits()


def lint_environments(
    environments: Iterable[ProcessEnvironment],
    versions: Mapping[str, str] | None = None,
    launcher: str | None = None,
    table: VariableTable | None = None,
    job: JobTraits | None = None,
) -> list[Finding]:
    """Returns the findings about these environments; adds one of severity `ok` if there is no error or warning.

    See `LintRequest` for the arguments.

    Raises:
        ValueError: The launcher is unknown.
    """
    request = LintRequest(tuple(environments), versions or {}, launcher, table or load_variables(), job or JobTraits())
    if launcher or len({environment.host for environment in request.environments if environment.host}) > 1:
        request = replace(request, job=replace(request.job, multi_host=True))
    if launcher is not None and launcher not in request.table.launchers:
        raise ValueError(f"unknown launcher {launcher!r}: expected one of {', '.join(sorted(request.table.launchers))}")
    found = [
        *_merge_equal(_check_environments(request)),
        *_check_between_hosts(request),
        *_check_forwarding(request),
    ]
    if not any(each.severity in ("error", "warning") for each in found):
        set_names = {name for environment in request.environments for name in environment.variables}
        known = count_noun(len(set_names & request.table.names), "variable")
        text = f"{known} that libraries read, all without a problem"
        found.append(Finding("env-fine", "ok", "", text))
    return found


def format_assignment(name: str, value: str, table: VariableTable) -> str:
    """Returns `NAME=value`. Hides the value if the variable is unknown, or if the value is or looks like a secret."""
    known = table.known.get(name)
    is_hidden = known is None or known.variable.secret or is_secret_name(name) or secret_kind(value) is not None
    text = HIDDEN if is_hidden and value else value
    return f"{name}={text if len(text) <= _MAX_VALUE_CHARS else text[:_MAX_VALUE_CHARS] + '...'}"


def _check_environments(request: LintRequest) -> Iterator[tuple[Finding, str]]:
    """Yields each finding with the label of its environment. Checks environments with equal relevant values once."""
    known = request.table.known
    names = {name for environment in request.environments for name in environment.variables}
    unknown = {name: tuple(_check_unknown(name, request)) for name in names if name not in known}
    relevant = {name for name in names if name in known or unknown[name]}
    checked: dict[tuple[tuple[str, str], ...], tuple[Finding, ...]] = {}
    for environment in request.environments:
        values = tuple(sorted(pair for pair in environment.variables.items() if pair[0] in relevant))
        if values not in checked:
            findings = (
                _check_known(known[n], v, environment, request) if n in known else unknown[n] for n, v in values
            )
            checked[values] = tuple(finding for each in findings for finding in each)
        yield from ((finding, environment.label) for finding in checked[values])


def _check_known(
    known: KnownVariable, value: str, environment: ProcessEnvironment, request: LintRequest
) -> Iterator[Finding]:
    """Yields the findings about a variable of the table."""
    variable = known.variable
    name_findings = list(_check_unread(known, value, request))
    installed = request.versions.get(known.library.library)
    harms = [harm for harm in variable.harmful_values if _is_harmful(harm, value, installed, request.job)]
    unread = any(each.id in ("env-unread", "env-gone") for each in name_findings)
    if unread or not harms:  # a harmful value is one finding, which also names the new name
        yield from name_findings
    if unread:
        return  # a variable that nothing reads has neither conflicts nor bad values
    if problem := value_problem(variable, value):
        why = variable.bad or _value_problem_text(variable, problem)
        message = f"{format_assignment(variable.name, value, request.table)} is not {problem}"
        yield _finding("env-value", variable.bad_severity, message, why, "", variable)
    for harm in harms:
        is_renamed = bool(name_findings)  # the other findings about the name ended this function
        yield _harmful_value_finding(known, value, harm, is_renamed, request)
    for conflict in variable.conflicts:
        other = environment.variables.get(conflict.other)
        if other is not None and value_matches(value, conflict.when) and value_matches(other, conflict.other_when):
            yield _conflict_finding(variable, value, other, conflict, request)


def _check_unread(known: KnownVariable, value: str, request: LintRequest) -> Iterator[Finding]:
    """Yields a finding if nothing reads the variable, it was renamed, or the installed version does not read it."""
    variable, library = known.variable, known.library
    installed = request.versions.get(library.library)
    assignment = format_assignment(variable.name, value, request.table)
    if not variable.readers:
        fix = f"set {variable.renamed}" if variable.renamed else variable.instead
        yield _finding("env-unread", "warning", f"nothing reads {assignment}", variable.does, fix, variable)
        return
    removed = version_reached(installed, variable.until)
    if removed or (removed is None and variable.until is not None):
        yield _removed_finding(variable, library.title, assignment, installed)
        return
    if variable.renamed is not None and version_reached(installed, variable.renamed_since) is not False:
        since = f" since {library.title} {variable.renamed_since}" if variable.renamed_since else ""
        text = f"{assignment}: the name is now {variable.renamed}{since}"
        yield _finding("env-renamed", "note", text, variable.does, f"set {variable.renamed} instead", variable)
    elif version_reached(installed, variable.since) is False:
        text = f"{assignment}: read since {library.title} {variable.since}, but {installed} is installed"
        yield _finding("env-unread", "warning", text, variable.does, f"unset {variable.name}", variable)


def _removed_finding(variable: EnvironmentVariable, title: str, assignment: str, installed: str | None) -> Finding:
    fix = f"set {variable.renamed} instead" if variable.renamed else variable.instead or f"unset {variable.name}"
    version_text = "" if installed is None else f", and {installed} is installed"
    text = f"{assignment}: no longer read since {title} {variable.until}{version_text}"
    return _finding("env-gone", "warning", text, variable.does, fix, variable)


def _check_long_removed(name: str, library: LibraryVariables, request: LintRequest) -> Iterator[Finding]:
    installed, until = request.versions.get(library.library), library.removed[name]
    if version_reached(installed, until) is not False:
        version_text = "" if installed is None else f", and {installed} is installed"
        message = f"{name}: no longer read since {library.title} {until}{version_text}"
        why = "The library has replaced or dropped it."
        yield Finding("env-gone", "warning", "", message, why, f"unset {name}", library.names_source or "")


def _check_unknown(name: str, request: LintRequest) -> Iterator[Finding]:
    """Yields findings about misspelt or removed names with the prefix of a library; other names are the user's."""
    table = request.table
    if len(name) > _MAX_NAME_CHARS:
        return
    library = table.library_of(name)
    if library is not None and name in library.removed:
        yield from _check_long_removed(name, library, request)
    if name in table.names or table.is_user_defined(name):
        return
    if library is not None:
        names_of_library = frozenset(each for each in table.names if table.library_of(each) is library)
        near = nearest_name(name, names_of_library, len(table.prefix_of(name)))
        source = library.names_source or ""
        if near is not None:
            message = f"nothing reads {name}. Did you mean {near}?"
            why = f"{library.title} has no variable of this name, so it has no effect."
            source = _source(table, near) or source
            yield Finding("env-misspelt", "error", "", message, why, f"rename it to {near}", source)
            return
        if library.shared_prefixes:
            return
        message = f"{name} is not in the list of {library.title}'s variables"
        why = f"Names with this prefix belong to {library.title}. The list was taken from {library.listed_from}."
        yield Finding("env-unknown", "note", "", message, why, f"unset {name}, unless a plug-in reads it", source)
    elif (near := _misspelt_prefix(name, table)) is not None:
        message = f"nothing reads {name}. Did you mean {near}?"
        why = "A variable with a misspelt prefix has no effect."
        yield Finding("env-misspelt", "error", "", message, why, f"rename it to {near}", _source(table, near))


def _misspelt_prefix(name: str, table: VariableTable) -> str | None:
    """Returns the known name that differs from `name` only in its case or in two swapped letters of its prefix.

    Examples are `nccl_debug` and `NCLL_DEBUG`. None if there is no such name.
    """
    upper = name.upper()
    if upper != name and (found := next((each for each in table.names if each.upper() == upper), None)) is not None:
        return found if table.library_of(found) is not None else None
    given, _, rest = name.partition("_")
    if len(given) < 4 or not rest:
        return None
    # Only swapped letters are a typing error: HCCL and RCCL are libraries with variables too.
    prefixes = {prefix.partition("_")[0] for library in table.libraries for prefix in library.prefixes}
    near = (each for each in prefixes if set(each) == set(given) and edit_distance(each, given, 1) == 1)
    return next((f"{each}_{rest}" for each in near if f"{each}_{rest}" in table.names), None)


def _is_harmful(harm: HarmfulValue, value: str, installed: str | None, job: JobTraits) -> bool:
    """Whether a value is harmful with the installed version and the GPUs of the host."""

    def has_gpu(pattern: str) -> bool:
        return any(re.search(pattern, name) for name in job.gpus)

    if (harm.gpus and not has_gpu(harm.gpus)) or (harm.not_gpus and has_gpu(harm.not_gpus)):
        return False
    return value_matches(value, harm.when) and version_reached(installed, harm.since) is not False


def _harmful_value_finding(
    known: KnownVariable, value: str, harm: HarmfulValue, is_renamed: bool, request: LintRequest
) -> Finding:
    variable = known.variable
    message = format_assignment(variable.name, value, request.table)
    if is_renamed:
        since = f" since {known.library.title} {variable.renamed_since}" if variable.renamed_since else ""
        message += f" (the name is now {variable.renamed}{since})"
    fix = harm.fix or f"unset {variable.name} when debugging is done"
    severity = _severity_for_job(harm, request.job)
    right_on_one_host = severity == "note" and harm.severity != "note" and harm.where == "several"
    return _finding("env-left-on", severity, message, harm.why, "" if right_on_one_host else fix, variable)


def _severity_for_job(harm: HarmfulValue, job: JobTraits) -> Severity:
    """Returns the severity of a harmful value for a job.

    It is a note if the value only harms other jobs. If it is not known whether it harms this one, an error becomes a
    warning.
    """
    affected = {None: True, "several": job.multi_host, "cuda": job.cuda}[harm.where]
    if affected is None and harm.severity == "error":
        return "warning"
    return "note" if affected is False else harm.severity


def _conflict_finding(
    variable: EnvironmentVariable, value: str, other: str, conflict: VariableConflict, request: LintRequest
) -> Finding:
    message = (
        f"{format_assignment(variable.name, value, request.table)} with "
        f"{format_assignment(conflict.other, other, request.table)}"
    )
    fix = conflict.fix or f"unset one of {variable.name} and {conflict.other}"
    return _finding("env-conflict", conflict.severity, message, conflict.why, fix, variable)


def _finding(id: str, severity: Severity, message: str, why: str, fix: str, variable: EnvironmentVariable) -> Finding:
    return Finding(id, severity, "", message, why, fix, variable.sources[0])


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
    """Merges equal findings of several environments into one that names all of them."""
    labels_of: dict[Finding, list[str]] = {}
    for finding, label in findings:
        labels_of.setdefault(finding, []).append(label)
    for finding, labels in labels_of.items():
        yield replace(finding, host=_host_list([each for each in labels if each]))


def _host_list(labels: Sequence[str]) -> str:
    return summarize_list(list(dict.fromkeys(labels)), _MAX_LISTED)


def _check_between_hosts(request: LintRequest) -> Iterator[Finding]:
    """Yields findings about variables that should be equal on all hosts and are not."""
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
            message = f"{name} differs: {'; '.join(parts)}"
            yield Finding(
                "env-differs", known.variable.differs, _host_list([each.label for each in environments]), message,
                known.variable.does, fix, known.variable.sources[0],
            )  # fmt: skip


def _value_on(name: str, value: str | None, labels: Sequence[str], table: VariableTable) -> str:
    return f"{'not set' if value is None else format_assignment(name, value, table)} on {_host_list(labels)}"


def _check_forwarding(request: LintRequest) -> Iterator[Finding]:
    """Yields findings about variables that are set where the job is started but do not reach the workers."""
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
            message = (
                f"{format_assignment(name, shell.variables[name], request.table)} of the shell is not set on "
                f"{_host_list(lacking)}"
            )
            launcher = request.table.launchers.get(request.launcher or "")
            fix = launcher.fix if launcher else f"set {name} on every host, or make the launcher forward it"
            yield Finding(
                "env-not-seen", "warning", _host_list(lacking), message, known.variable.does, fix.format(name=name),
                known.variable.sources[0],
            )  # fmt: skip


def _not_forwarded(shell: ProcessEnvironment, launcher: LauncherForwarding, table: VariableTable) -> Iterator[Finding]:
    names = [name for name, _ in _variables_for_workers(shell, table) if not _is_forwarded(name, launcher.forwards)]
    if names:
        be = "is" if len(names) == 1 else "are"
        message = (
            f"{summarize_list(names, _MAX_LISTED)} {be} set in this shell but will not reach workers on other hosts"
        )
        yield Finding(
            "env-not-seen", "warning", shell.host, f"{message} on other hosts ({launcher.title})", launcher.why,
            launcher.fix.format(name=names[0]), launcher.sources[0],
        )  # fmt: skip


def _variables_for_workers(shell: ProcessEnvironment, table: VariableTable) -> Iterator[tuple[str, KnownVariable]]:
    """Yields the variables of a shell that workers read and that should be equal on all hosts."""
    for name in sorted(shell.variables):
        known = table.known.get(name)
        if known is not None and known.variable.readers and known.variable.differs != "expected":
            yield name, known


def _is_forwarded(name: str, patterns: Iterable[str]) -> bool:
    """Whether a name is one of these names, or begins with one of the prefixes that end in `*`."""
    return any(name.startswith(each[:-1]) if each.endswith("*") else name == each for each in patterns)
