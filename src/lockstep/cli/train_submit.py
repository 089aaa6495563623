"""Implementation of `lockstep train --submit`: submits the run as a Ray job and follows its log."""

import os
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from lockstep.base.folders import scratch_dir
from lockstep.base.secrets import is_secret_name, secret_kind
from lockstep.base.text import terminal_safe
from lockstep.cli.terminal import FAILED, INTERRUPTED, REFUSED
from lockstep.cluster.ray.ray_jobs import RayJob, RayJobResult, SubmissionError, follow_job, submit_job
from lockstep.cluster.worker_environment import ForwardedEnvironment, forward_environment, without_secrets
from lockstep.config.cluster import RayClusterConfig
from lockstep.config.run_config import RunConfig
from lockstep.report.command_events import TERMINAL, CommandEvents, LogFormat
from lockstep.run.errors import RunRefused
from lockstep.run.planning.ray_package import CONFIG_FILE, build_ray_package

_WHY_NO_PYTHONPATH = "it lists folders of this host"


def submit_run(
    address: str,
    config: RunConfig | None,
    resume: Path | None,
    overrides: Sequence[str],
    events: CommandEvents = TERMINAL,
) -> int:
    """Submits the run, follows its log and returns its exit code.

    Ctrl-C stops following; the job continues, as with `ray job submit`.
    """
    requested: list[RayJob] = []
    try:
        job = _submit_job(address, config, resume, overrides, requested.append, events)
    except KeyboardInterrupt:
        for job in requested[-1:]:
            events.note(f"job {job.id} may have been submitted. Follow it: {job.follow_again()}; stop it: {job.stop()}")
        return INTERRUPTED
    except (RunRefused, SubmissionError, OSError) as error:
        events.refuse(error)
        return REFUSED
    events.note(f"submitted job {job.id} to {job.address}")
    try:
        return _exit_code(follow_job(job, _write_log), events)
    except KeyboardInterrupt:
        events.note(f"the job continues. Follow it: {job.follow_again()}; stop it: {job.stop()}")
        return INTERRUPTED
    except SubmissionError as error:
        events.note(f"lost contact with the job: {error}. Follow it again: {job.follow_again()}")
        return FAILED


def _submit_job(
    address: str,
    config: RunConfig | None,
    resume: Path | None,
    overrides: Sequence[str],
    on_request: Callable[[RayJob], None],
    events: CommandEvents,
) -> RayJob:
    options = [] if events.log_format is LogFormat.text else ["--log-format", events.log_format.value]
    if resume is not None and not resume.is_absolute():
        raise RunRefused(f"--resume {resume} must be the absolute path of the run folder on the cluster")
    if config is None:
        if resume is None:
            raise RunRefused("nothing to submit: give FILE.yaml or --resume RUN")
        _refuse_secrets(overrides)
        words = ["python", "-m", "lockstep", "train", "--resume", str(resume), *options, *overrides]
        return submit_job(address, resume.name, shlex.join(words), None, {}, on_request)
    config = _require_ray(config, events)
    assert isinstance(config.cluster, RayClusterConfig)
    forwarded = _job_environment(config.cluster)
    _show_forwarded(forwarded, events)
    with scratch_dir("lockstep-submit-") as folder:
        package = build_ray_package(config, folder)
        if package.absolute_paths:
            events.note(f"not uploaded, so these must exist on the cluster: {', '.join(package.absolute_paths)}")
        words = [
            "python",
            "-m",
            "lockstep",
            "train",
            CONFIG_FILE,
            *(["--resume", str(resume)] if resume is not None else []),
            *options,
        ]
        return submit_job(address, config.name, shlex.join(words), package.folder, forwarded.values, on_request)


def _refuse_secrets(overrides: Sequence[str]) -> None:
    """Raises RunRefused if an override contains a secret: Ray's dashboard shows the command of a job."""
    for override in overrides:
        name, _, value = override.partition("=")
        if value and (is_secret_name(name) or secret_kind(value) is not None):
            raise RunRefused(
                f"{name} looks like a secret, and Ray's dashboard shows the command of a job to everyone: set it in "
                "the environment in which the cluster is started"
            )


def _require_ray(config: RunConfig, events: CommandEvents) -> RunConfig:
    if config.cluster.kind == "ray":
        return config
    if "cluster" in config.model_fields_set:
        raise RunRefused("--submit runs on a Ray cluster, but cluster.kind is local: set cluster=ray")
    events.note("using cluster=ray: the run is submitted to a Ray cluster, and its config names no cluster")
    return config.model_copy(update={"cluster": RayClusterConfig()})


def _job_environment(cluster: RayClusterConfig) -> ForwardedEnvironment:
    """The variables of this shell that the job's driver gets and forwards to all workers."""
    given = without_secrets(forward_environment(os.environ, cluster.forward_env, {}))
    if "PYTHONPATH" not in given.values:
        return given
    values = {name: value for name, value in given.values.items() if name != "PYTHONPATH"}
    return ForwardedEnvironment(values, given.kept_back | {"PYTHONPATH": _WHY_NO_PYTHONPATH})


def _show_forwarded(given: ForwardedEnvironment, events: CommandEvents) -> None:
    if given.values:
        events.note(f"forwarding these variables of this shell: {', '.join(given.values)}")
    for name, why in given.kept_back.items():
        events.note(f"not forwarding {name}: {why}")


def _write_log(text: str) -> None:
    sys.stdout.write(terminal_safe(text, mark=""))
    sys.stdout.flush()


def _exit_code(ended: RayJobResult, events: CommandEvents) -> int:
    if ended.status == "STOPPED":
        events.note("the job was stopped")
        return INTERRUPTED
    if ended.status == "FAILED":
        why = ended.message.partition(", last available logs")[0]  # the log was already shown
        events.note(f"the job failed: {' '.join(why.split())[:500]}")
        return ended.exit_code if ended.exit_code is not None and ended.exit_code > 0 else FAILED
    return 0
