"""`lockstep check`: is this going to work, and if not, which host, which cable, which variable."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from lockstep.cli.errors import FAILED, REFUSED, show_note, show_refusal
from lockstep.config.errors import ConfigError
from lockstep.config.load import load_config

if TYPE_CHECKING:
    from lockstep.cli.check_hosts import Beyond
    from lockstep.config.cluster import RayCluster
    from lockstep.config.recipes import GRPOConfig, SFTConfig
    from lockstep.config.run import RunConfig
    from lockstep.doctor.environment.lint import Place
    from lockstep.doctor.finding import Report


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
        float, typer.Option(min=1, metavar="SECONDS", help="How long probes that people start are waited for.")
    ] = 120.0,
    small_first: Annotated[
        bool, typer.Option("--small-first", help="Then run the config at two steps and tiny sizes.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON, nothing else.")] = False,
) -> None:
    """Check, before a run, what would make it fail, hang or crawl, and say what helps.

    Ends with 0 where nothing is wrong, 1 where something is, 2 where it cannot check what it is given.

    Examples:

        lockstep check

        lockstep check examples/grpo_sort.yaml

        lockstep check run.yaml --json

        lockstep check --env --launcher ray

        docker inspect trainer | lockstep check --env-file -

        lockstep check run.yaml --small-first

        lockstep check run.yaml --hosts node-a,node-b

        lockstep check --join 192.0.2.7:41234 --name node-b
    """
    from lockstep.cli import check_hosts
    from lockstep.doctor.finding import Report

    try:
        if small_first and file is None:
            raise ValueError("--small-first runs a config: name its file")
        if join is not None:
            check_hosts.join(join, name, address)
            raise typer.Exit
        config = load_config(Path(file), list(overrides or [])) if file is not None else None
        report = Report()
        beyond = check_hosts.Beyond(check_hosts.split_names(hosts), address, check_hosts.split_ports(ports), wait)
        if not env and not env_files:
            _climb(report, config, bool(beyond.hosts))
        _environment(report, config, env_files or (), launcher, bool(beyond.hosts))
        if not env and not env_files:
            _beyond(report, config, list(overrides or []), beyond)
        if small_first and config is not None and file is not None:
            from lockstep.cli.check_plan import small_first as run_small

            run_small(report, config, Path(file), list(overrides or []))
    except (ConfigError, ValueError, OSError) as error:
        show_refusal(error)
        raise typer.Exit(REFUSED) from error
    if as_json:
        typer.echo(json.dumps(report.json(), indent=2))
    else:
        _show(report)
    raise typer.Exit(0 if report.passed else FAILED)


def _climb(report: "Report", config: "RunConfig | None", several: bool) -> None:
    """The rungs, from the host outwards."""
    from lockstep.doctor.check.host import RUNGS, gather, judge
    from lockstep.doctor.check.system import System
    from lockstep.doctor.check.wanted import needs_of

    needs = needs_of(config, several)
    facts = gather(System(), needs)
    for rung, findings in judge(facts, needs).items():
        title, parts = RUNGS[rung]
        report.add(rung, title, findings, max((facts.seconds.get(part, 0.0) for part in parts), default=0.0))


def _beyond(report: "Report", config: "GRPOConfig | SFTConfig | None", overrides: list[str], beyond: "Beyond") -> None:
    """The rungs that are about a config, and those of several hosts."""
    from lockstep.cli import check_hosts

    plan = None
    if config is not None:
        from lockstep.cli import check_plan  # imports torch

        plan = check_plan.climb(report, config, overrides, check_hosts.room_of_process(config))
    check_hosts.climb(report, config, beyond, show_note, plan)


def _environment(
    report: "Report", config: "RunConfig | None", files: Sequence[str], launcher: str | None, several: bool
) -> None:
    from lockstep.doctor.check.wanted import needs_of
    from lockstep.doctor.environment.here import from_files, gpus, here, versions
    from lockstep.doctor.environment.lint import Job, lint

    if files:
        places, known, job = from_files(files), {}, Job()
    else:
        needs = needs_of(config, several)
        places, known, job = [here()], versions(), Job(needs.several, needs.gpus, gpus())
        if config is not None and config.cluster.kind == "ray":
            places.append(_passed_on(places[0], config.cluster))
            launcher = launcher or "lockstep"
        elif "RAY_ADDRESS" in places[0].variables:
            launcher = launcher or "ray"
    report.add("environment", "Environment", lint(places, known, launcher, job=job))


def _passed_on(shell: "Place", cluster: "RayCluster") -> "Place":
    """What the config makes of this shell on other nodes; what it keeps back there on purpose counts as there."""
    from lockstep.cluster.environment import forwarded
    from lockstep.doctor.environment.lint import Place

    given = forwarded(shell.variables, cluster.forward_env, cluster.env, cluster.interface)
    own = {name: shell.variables[name] for name in given.kept_back if name in shell.variables}
    return Place("", {**own, **given.values}, "workers on other nodes")


def _show(report: "Report") -> None:
    from lockstep.doctor.render import render

    Console(soft_wrap=False).print(render(report))
