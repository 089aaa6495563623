"""`lockstep check`: is this going to work, and if not, which host, which cable, which variable."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lockstep.cli.check_arguments import CLUSTERS, Asked, read_arguments
from lockstep.cli.check_report import Told
from lockstep.cli.errors import FAILED, REFUSED, show_note, show_refusal
from lockstep.config.cluster import RayCluster
from lockstep.config.errors import ConfigError

if TYPE_CHECKING:
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
            from lockstep.cli.check_join import join as join_check

            join_check(join, name, address, wait)
            raise typer.Exit
        if small_first and file is None:
            raise ValueError("--small-first runs a config: name its file")
        asked = read_arguments(file, overrides or (), hosts, cluster, address, ports, wait)
    except (ConfigError, ValueError, OSError) as error:
        show_refusal(error)
        raise typer.Exit(REFUSED) from error
    report = Told(as_json)
    try:
        if not env and not env_files:
            _climb(report, asked)
        _environment(report, asked, env_files or (), launcher)
        if not env and not env_files:
            _beyond(report, asked)
        if small_first and asked.config is not None and file is not None:
            from lockstep.cli.check_plan import small_first as run_small

            run_small(report, asked.config, Path(file), asked.overrides)
    except BaseException as error:
        report.break_off(error)
        if isinstance(error, (ConfigError, ValueError, OSError)):
            show_refusal(error)
            raise typer.Exit(REFUSED) from error
        raise
    report.end()
    raise typer.Exit(0 if report.passed else FAILED)


def _climb(report: "Report", asked: Asked) -> None:
    """The rungs, from the host outwards."""
    from lockstep.doctor.check.host import RUNGS, gather, judge
    from lockstep.doctor.check.system import System
    from lockstep.doctor.check.wanted import needs_of

    needs = needs_of(asked.config, asked.several)
    facts = gather(System(), needs)
    for rung, findings in judge(facts, needs).items():
        title, parts = RUNGS[rung]
        report.add(rung, title, findings, max((facts.seconds.get(part, 0.0) for part in parts), default=0.0))


def _beyond(report: "Report", asked: Asked) -> None:
    """The rungs that are about a config, and those of several hosts."""
    from lockstep.cli import check_hosts

    plan = None
    if asked.config is not None:
        from lockstep.cli import check_plan  # imports torch

        room = check_hosts.room_of_process(asked.config)
        plan = check_plan.climb(report, asked.config, asked.overrides, room)
    check_hosts.climb(report, asked.config, asked.beyond, show_note, plan)


def _environment(report: "Report", asked: Asked, files: Sequence[str], launcher: str | None) -> None:
    from lockstep.doctor.check.wanted import needs_of
    from lockstep.doctor.environment.here import from_files, gpus, here, versions
    from lockstep.doctor.environment.lint import Job, lint

    if files:
        places, known, job = from_files(files), {}, Job()
    else:
        needs = needs_of(asked.config, asked.several)
        places, known, job = [here()], versions(), Job(needs.several, needs.gpus, gpus())
        on_ray = isinstance(asked.beyond.cluster, RayCluster)
        if asked.config is not None and isinstance(asked.config.cluster, RayCluster):
            places.append(_passed_on(places[0], asked.config.cluster))
            launcher = launcher or "lockstep"
        elif on_ray or "RAY_ADDRESS" in places[0].variables:
            launcher = launcher or "ray"
    report.add("environment", "Environment", lint(places, known, launcher, job=job))


def _passed_on(shell: "Place", cluster: RayCluster) -> "Place":
    """What the config makes of this shell on other nodes; what it keeps back there on purpose counts as there."""
    from lockstep.cluster.environment import forwarded
    from lockstep.doctor.environment.lint import Place

    given = forwarded(shell.variables, cluster.forward_env, cluster.env, cluster.interface)
    own = {name: shell.variables[name] for name in given.kept_back if name in shell.variables}
    return Place("", {**own, **given.values}, "workers on other nodes")
