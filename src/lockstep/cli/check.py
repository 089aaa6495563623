"""How the report of a check reaches who waits for it: rung by rung on the terminal, or whole as JSON."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from lockstep.cli.check_arguments import CLUSTERS, CheckRequest, read_arguments
from lockstep.cli.terminal import FAILED, REFUSED, show_note, show_refusal
from lockstep.config.cluster import RayClusterConfig
from lockstep.config.errors import ConfigError
from lockstep.doctor.output.findings import CheckReport, Finding
from lockstep.doctor.output.findings_table import covers_several_hosts, render_section, report_summary


class LiveReport(CheckReport):
    """A report whose rungs are printed as they are climbed.

    Args:
        as_json: all at the end instead, as one object.
    """

    def __init__(self, as_json: bool) -> None:
        super().__init__()
        self._json, self._console = as_json, Console(soft_wrap=False)

    def add(self, name: str, title: str, findings: Iterable[Finding], seconds: float = 0.0) -> None:
        """One rung more."""
        CheckReport.add(self, name, title, findings, seconds)
        if not self._json and self.rungs[-1].findings:
            self._console.print(render_section(self.rungs[-1], covers_several_hosts(self)))

    def end(self) -> None:
        """The answer in one line, or the whole report as JSON."""
        if self._json:
            typer.echo(json.dumps(self.json(), indent=2))
        else:
            self._console.print(report_summary(self))

    def break_off(self, error: BaseException) -> None:
        """Ends a report whose next rung could not be climbed; nothing where there is none yet."""
        if self.rungs:
            said = f"the rungs that come after these were not climbed: {str(error) or type(error).__name__}"
            self.add("ended", "Not climbed", [Finding("check-ended", "unchecked", "", said)])
            self.end()


if TYPE_CHECKING:
    from lockstep.doctor.environment.environment_lint import ProcessEnvironment
    from lockstep.doctor.output.findings import CheckReport


def command(
    file: Annotated[
        str | None, typer.Argument(metavar="CONFIG", help="The run to check for; without it the host alone.")
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="SECTION.KEY=VALUE", help="Values in place of the file's.")
    ] = None,
    env: Annotated[
        bool, typer.Option("--env", help="Look at the environment only: variables that do not do what is meant.")
    ] = False,
    env_files: Annotated[
        list[str] | None,
        typer.Option(
            "--env-file",
            metavar="FILE",
            help="In place of this shell's environment: exports, `env` output, docker -e, YAML, JSON, an incident's "
            "environment.json; '-' for standard input. Several are several hosts.",
        ),
    ] = None,
    launcher: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="How workers on other hosts are started: accelerate, deepspeed, lockstep, mpirun, openrlhf, ray, "
            "slurm, ssh, torchrun, verl, vllm. Says what of this shell they will not see; ray "
            "where RAY_ADDRESS is set.",
        ),
    ] = None,
    hosts: Annotated[
        str | None, typer.Option(metavar="A,B,C", help="Check these hosts together; says what to start on each.")
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(metavar="CLUSTER", help=f"Check the hosts of this cluster, whatever the config says: {CLUSTERS}."),
    ] = None,
    join: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Be the probe of this host for the check that runs there.")
    ] = None,
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="With --join: what the check calls this host.")
    ] = None,
    address: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="By which of this host's addresses the others reach it.")
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
            help="How long probes that people start are waited for (120), or with --join the head is tried (30).",
        ),
    ] = None,
    small_first: Annotated[
        bool, typer.Option("--small-first", help="Then run the config at two steps and tiny sizes.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON, nothing else.")] = False,
) -> None:
    """Check, before a run, what would make it fail, hang or crawl, and say what helps.

    Ends with 0 where nothing is wrong, 1 where something is, 2 where it cannot check what it is given.

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
    try:
        if join is not None:
            from lockstep.cli.check_hosts import run_probe as join_check

            join_check(join, name, address, wait)
            raise typer.Exit
        if small_first and file is None:
            raise ValueError("--small-first runs a config: name its file")
        asked = read_arguments(file, overrides or (), hosts, cluster, address, ports, wait)
    except (ConfigError, ValueError, OSError) as error:
        show_refusal(error)
        raise typer.Exit(REFUSED) from error
    report = LiveReport(as_json)
    try:
        if not env and not env_files:
            _check_host(report, asked)
        _lint_environment(report, asked, env_files or (), launcher)
        if not env and not env_files:
            _check_beyond_host(report, asked)
        if small_first and asked.config is not None and file is not None:
            from lockstep.cli.check_plan import run_small as run_small

            run_small(report, asked.config, Path(file), asked.overrides)
    except BaseException as error:
        report.break_off(error)
        if isinstance(error, (ConfigError, ValueError, OSError)):
            show_refusal(error)
            raise typer.Exit(REFUSED) from error
        raise
    report.end()
    raise typer.Exit(0 if report.passed else FAILED)


def _check_host(report: "CheckReport", asked: CheckRequest) -> None:
    """The rungs, from the host outwards."""
    from lockstep.doctor.check.facts.host_requirements import requirements_of
    from lockstep.doctor.check.facts.host_system import HostSystem
    from lockstep.doctor.check.host_check import HOST_SECTIONS, gather_host, judge_host

    needs = requirements_of(asked.config, asked.several)
    facts = gather_host(HostSystem(), needs)
    for rung, findings in judge_host(facts, needs).items():
        title, parts = HOST_SECTIONS[rung]
        report.add(rung, title, findings, max((facts.seconds.get(part, 0.0) for part in parts), default=0.0))


def _check_beyond_host(report: "CheckReport", asked: CheckRequest) -> None:
    """The rungs that are about a config, and those of several hosts."""
    from lockstep.cli import check_hosts

    plan = None
    if asked.config is not None:
        from lockstep.cli import check_plan  # imports torch

        room = check_hosts.process_memory(asked.config)
        plan = check_plan.check_plan(report, asked.config, asked.overrides, room)
    check_hosts.check_hosts(report, asked.config, asked.beyond, show_note, plan)


def _lint_environment(report: "CheckReport", asked: CheckRequest, files: Sequence[str], launcher: str | None) -> None:
    from lockstep.doctor.check.facts.host_requirements import requirements_of
    from lockstep.doctor.environment.environment_lint import JobTraits, lint_environments
    from lockstep.doctor.environment.environment_sources import (
        current_environment,
        environments_from_files,
        gpu_names,
        library_versions,
    )

    if files:
        places, known, job = environments_from_files(files), {}, JobTraits()
    else:
        needs = requirements_of(asked.config, asked.several)
        places, known, job = (
            [current_environment()],
            library_versions(),
            JobTraits(needs.several, needs.gpus, gpu_names()),
        )
        on_ray = isinstance(asked.beyond.cluster, RayClusterConfig)
        if asked.config is not None and isinstance(asked.config.cluster, RayClusterConfig):
            places.append(_worker_environment(places[0], asked.config.cluster))
            launcher = launcher or "lockstep"
        elif on_ray or "RAY_ADDRESS" in places[0].variables:
            launcher = launcher or "ray"
    report.add("environment", "Environment", lint_environments(places, known, launcher, job=job))


def _worker_environment(shell: "ProcessEnvironment", cluster: RayClusterConfig) -> "ProcessEnvironment":
    """What the config makes of this shell on other nodes; what it keeps back there on purpose counts as there."""
    from lockstep.cluster.worker_environment import forward_environment
    from lockstep.doctor.environment.environment_lint import ProcessEnvironment

    given = forward_environment(shell.variables, cluster.forward_env, cluster.env, cluster.interface)
    own = {name: shell.variables[name] for name in given.kept_back if name in shell.variables}
    return ProcessEnvironment("", {**own, **given.values}, "workers on other nodes")
