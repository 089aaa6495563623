"""`lockstep check`: finds what would make a run fail, hang or crawl, and names the host, variable or setting to fix."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lockstep.cli.terminal import FAILED, REFUSED, LogFormatOption, require_extra
from lockstep.report.command_events import CommandEvent, CommandEvents, LogFormat, open_events

if TYPE_CHECKING:
    from lockstep.cli.check.check_arguments import CheckRequest
    from lockstep.config.cluster import RayClusterConfig
    from lockstep.doctor.environment.environment_lint import ProcessEnvironment
    from lockstep.doctor.output.findings import CheckReport, CheckSection

CLUSTERS = "local, ray, auto, or HOST:PORT of the head of a running Ray cluster"


def command(
    file: Annotated[
        str | None,
        typer.Argument(metavar="CONFIG", help="Config of the run to check; without it, only this host is checked."),
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="SECTION.KEY=VALUE", help="Overrides of the file's values.")
    ] = None,
    env: Annotated[bool, typer.Option("--env", help="Check only the environment variables.")] = False,
    env_files: Annotated[
        list[str] | None,
        typer.Option(
            "--env-file",
            metavar="FILE",
            help="Check these variables instead of this shell's: exports, `env` output, docker -e, YAML, JSON, an "
            "incident's environment.json; '-' for standard input. Give one file per host.",
        ),
    ] = None,
    launcher: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="What starts the workers on other hosts: accelerate, deepspeed, lockstep, mpirun, openrlhf, ray, "
            "slurm, ssh, torchrun, verl or vllm. Reports which variables of this shell it does not forward to them. "
            "Default: ray if RAY_ADDRESS is set.",
        ),
    ] = None,
    hosts: Annotated[
        str | None,
        typer.Option(metavar="A,B,C", help="Check these hosts together; prints a command to run on each."),
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(metavar="CLUSTER", help=f"Check the hosts of this cluster instead of the config's: {CLUSTERS}."),
    ] = None,
    join: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Run as this host's probe for the check at this address.")
    ] = None,
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="With --join: name of this host in the report.")
    ] = None,
    address: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Address at which other hosts can reach this host.")
    ] = None,
    ports: Annotated[
        str | None, typer.Option(metavar="PORTS", help="Ports that the run will use, such as 29500,10002-10100.")
    ] = None,
    wait: Annotated[
        float | None,
        typer.Option(
            min=1,
            max=3000,
            metavar="SECONDS",
            help="How long to wait for probes that are started by hand (default: 120), or with --join for the check "
            "that this probe joins (default: 30).",
        ),
    ] = None,
    small_first: Annotated[
        bool, typer.Option("--small-first", help="Also train with this config for two steps with tiny sizes.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print only JSON.")] = False,
    log_format: LogFormatOption = LogFormat.text,
) -> None:
    """Find out before a run what would make it fail, hang or crawl, and how to fix it.

    The exit code is 0 without errors, 1 with errors, and 2 if the given input cannot be checked.

    Examples:

        lockstep check

        lockstep check examples/sft_sort.yaml

        lockstep check run.yaml --json

        lockstep check --env --launcher ray

        docker inspect trainer | lockstep check --env-file -

        lockstep check run.yaml --small-first

        lockstep check run.yaml --hosts node-a,node-b

        lockstep check run.yaml --cluster ray

        lockstep check --join 192.0.2.7:41234 --name node-b
    """
    events = open_events(log_format, "check")
    if join is not None:
        _join_check(join, name, address, wait, events)
        return
    from lockstep.cli.check.check_arguments import read_arguments
    from lockstep.config.errors import ConfigError
    from lockstep.doctor.output.findings_table import LiveReport
    from lockstep.report.safe_console import SafeConsole

    try:
        if small_first and file is None:
            raise ValueError("--small-first needs the file of a config")
        request = read_arguments(file, overrides or (), hosts, cluster, address, ports, wait)
    except (ConfigError, ValueError, OSError) as error:
        events.refuse(error)
        raise typer.Exit(REFUSED) from error
    if request.config is not None:
        require_extra("train", "lockstep check CONFIG", events)
    report = LiveReport(SafeConsole(), as_json, lambda section: events.report(_section_event(section)))
    scope = _Scope(not env and not env_files, env_files or (), launcher, Path(file) if small_first and file else None)
    try:
        _run_checks(report, request, scope, events)
    except BaseException as error:
        report.finish_early(error)
        if isinstance(error, (ConfigError, ValueError, OSError)):
            events.refuse(error)
            raise typer.Exit(REFUSED) from error
        raise
    report.finish()
    raise typer.Exit(0 if report.passed else FAILED)


@dataclass(frozen=True, slots=True)
class _Scope:
    """The parts of a check that the options select."""

    hosts: bool
    """Whether hosts and config are checked, and not only variables."""
    env_files: Sequence[str]
    launcher: str | None
    trial: Path | None
    """The config with which to train for two steps."""


def _section_event(section: "CheckSection") -> CommandEvent:
    """A complete section. Its text is part of the report on standard output."""
    severities = {each.severity for each in section.findings}
    level = "error" if "error" in severities else "warning" if "warning" in severities else "info"
    fields = {
        "section": section.name,
        "seconds": round(section.seconds, 3),
        "findings": [asdict(each) for each in section.findings],
    }
    return CommandEvent("section", section.title, None, level, fields)


def _run_checks(report: "CheckReport", request: "CheckRequest", scope: _Scope, events: CommandEvents) -> None:
    """Adds to the report what is found, from the cheapest check to the dearest."""
    if scope.hosts:
        _check_host(report, request)
    _lint_environment(report, request, scope.env_files, scope.launcher)
    if scope.hosts:
        _check_beyond_host(report, request, events)
    if scope.trial is not None and request.config is not None:
        from lockstep.cli.check.check_plan import run_trial

        run_trial(report, request.config, scope.trial, request.overrides)


def _join_check(where: str, name: str | None, address: str | None, wait_s: float | None, events: CommandEvents) -> None:
    """Runs as this host's probe. Imports nothing that only the head needs, so that the probe joins soon."""
    from lockstep.cli.check.check_join import run_probe

    try:
        run_probe(where, name, address, wait_s, events)
    except (ValueError, OSError) as error:
        events.refuse(error)
        raise typer.Exit(REFUSED) from error


def _check_host(report: "CheckReport", request: "CheckRequest") -> None:
    """Checks this host alone."""
    from lockstep.doctor.check.facts.host_requirements import requirements_of
    from lockstep.doctor.check.facts.host_system import HostSystem
    from lockstep.doctor.check.host_check import HOST_SECTIONS, gather_host, judge_host

    needs = requirements_of(request.config, request.names_other_hosts)
    facts = gather_host(HostSystem(), needs)
    for section, findings in judge_host(facts, needs).items():
        title, parts = HOST_SECTIONS[section]
        report.add(section, title, findings, max((facts.seconds.get(part, 0.0) for part in parts), default=0.0))


def _check_beyond_host(report: "CheckReport", request: "CheckRequest", events: CommandEvents) -> None:
    """Checks the config, and the other hosts together with this one."""
    from lockstep.cli.check import check_hosts

    plan = None
    if request.config is not None:
        from lockstep.cli.check import check_plan  # imports torch

        memory = check_hosts.process_memory(request.config)
        plan = check_plan.check_plan(report, request.config, request.overrides, memory)
    check_hosts.check_hosts(report, request.config, request.selection, events.note, plan)


def _lint_environment(
    report: "CheckReport", request: "CheckRequest", files: Sequence[str], launcher: str | None
) -> None:
    from lockstep.config.cluster import RayClusterConfig
    from lockstep.doctor.check.facts.host_requirements import requirements_of
    from lockstep.doctor.environment.environment_lint import JobTraits, lint_environments
    from lockstep.doctor.environment.environment_sources import (
        current_environment,
        environments_from_files,
        gpu_names,
        library_versions,
    )

    if files:
        environments, installed, job = environments_from_files(files), {}, JobTraits()
    else:
        needs = requirements_of(request.config, request.names_other_hosts)
        environments, installed, job = (
            [current_environment()],
            library_versions(),
            JobTraits(needs.several, needs.gpus, gpu_names()),
        )
        on_ray = isinstance(request.selection.cluster, RayClusterConfig)
        if request.config is not None and isinstance(request.config.cluster, RayClusterConfig):
            environments.append(_worker_environment(environments[0], request.config.cluster))
            launcher = launcher or "lockstep"
        elif on_ray or "RAY_ADDRESS" in environments[0].variables:
            launcher = launcher or "ray"
    report.add("environment", "Environment", lint_environments(environments, installed, launcher, job=job))


def _worker_environment(shell: "ProcessEnvironment", cluster: "RayClusterConfig") -> "ProcessEnvironment":
    """The environment that workers on other nodes get from this shell.

    It contains variables that Lockstep withholds on purpose, so that they are not reported as missing.
    """
    from lockstep.cluster.worker_environment import forward_environment
    from lockstep.doctor.environment.environment_lint import ProcessEnvironment

    forwarded = forward_environment(shell.variables, cluster.forward_env, cluster.env, cluster.interface)
    withheld = {name: shell.variables[name] for name in forwarded.kept_back if name in shell.variables}
    return ProcessEnvironment("", {**withheld, **forwarded.values}, "workers on other nodes")
