"""Implementation of `lockstep train --submit`: submits the run as a Ray job and follows its log."""

import os
import shlex
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from lockstep.base.secrets import is_secret_name, secret_kind
from lockstep.cli.terminal import FAILED, INTERRUPTED, REFUSED, show_note, show_refusal
from lockstep.cluster.ray.ray_jobs import RayJob, RayJobResult, SubmissionError, follow_job, submit_job
from lockstep.cluster.worker_environment import ForwardedEnvironment, forward_environment, without_secrets
from lockstep.config.cluster import RayClusterConfig
from lockstep.config.recipes import GRPOConfig, SFTConfig
from lockstep.run.errors import RunRefused
from lockstep.run.planning.ray_package import CONFIG_FILE, build_ray_package

_PYTHONPATH = "it names folders of the host that submits the run"


def submit_run(
    address: str, config: SFTConfig | GRPOConfig | None, resume: Path | None, overrides: Sequence[str]
) -> int:
    """Hands the run over and follows it; the exit code is the run's own. Ctrl-C detaches, as from `ray job submit`."""
    asked: list[RayJob] = []
    try:
        job = _submit_job(address, config, resume, overrides, asked.append)
    except KeyboardInterrupt:
        for job in asked[-1:]:
            show_note(f"job {job.id} may have been taken. Follow it: {job.follow_again()}; stop it: {job.stop()}")
        return INTERRUPTED
    except (RunRefused, SubmissionError, OSError) as error:
        show_refusal(error)
        return REFUSED
    show_note(f"job {job.id} is with {job.address}")
    try:
        return _exit_code(follow_job(job, _write_log))
    except KeyboardInterrupt:
        show_note(f"the job goes on. Follow it: {job.follow_again()}; stop it: {job.stop()}")
        return INTERRUPTED
    except SubmissionError as error:
        show_note(f"the job is not seen any more: {error}. Follow it again: {job.follow_again()}")
        return FAILED


def _submit_job(
    address: str,
    config: SFTConfig | GRPOConfig | None,
    resume: Path | None,
    overrides: Sequence[str],
    asked: Callable[[RayJob], None],
) -> RayJob:
    if resume is not None and not resume.is_absolute():
        raise RunRefused(f"--resume {resume} is looked for on the cluster: name it by its absolute path there")
    if config is None:
        if resume is None:
            raise RunRefused("name a file to train from, or a run with --resume")
        _must_be_public(overrides)
        words = ["python", "-m", "lockstep", "train", "--resume", str(resume), *overrides]
        return submit_job(address, resume.name, shlex.join(words), None, {}, asked)
    config = _require_ray(config)
    assert isinstance(config.cluster, RayClusterConfig)
    given = _job_environment(config.cluster)
    _show_forwarded(given)
    with tempfile.TemporaryDirectory(prefix="lockstep-submit-") as folder:
        staged = build_ray_package(config, Path(folder))
        if staged.elsewhere:
            show_note(f"not sent, to be there on the cluster: {', '.join(staged.elsewhere)}")
        words = [
            "python",
            "-m",
            "lockstep",
            "train",
            CONFIG_FILE,
            *(["--resume", str(resume)] if resume is not None else []),
        ]
        return submit_job(address, config.name, shlex.join(words), staged.folder, given.values, asked)


def _must_be_public(overrides: Sequence[str]) -> None:
    """Raises Refused for secrets: a job's command is shown to whoever sees the dashboard."""
    for override in overrides:
        name, _, value = override.partition("=")
        if value and (is_secret_name(name) or secret_kind(value) is not None):
            raise RunRefused(
                f"{name} looks like a secret, and a job's command is shown to everybody who sees the dashboard: set it "
                "in the environment that the cluster was started with"
            )


def _require_ray(config: SFTConfig | GRPOConfig) -> SFTConfig | GRPOConfig:
    if config.cluster.kind == "ray":
        return config
    if "cluster" in config.model_fields_set:
        raise RunRefused("cluster.kind is local, and --submit runs on the nodes of a Ray cluster: set cluster=ray")
    show_note("cluster=ray, as the run is submitted to one and its file names none")
    return config.model_copy(update={"cluster": RayClusterConfig()})


def _job_environment(cluster: RayClusterConfig) -> ForwardedEnvironment:
    """What the job's driver gets of this shell, from where it goes on to all workers."""
    given = without_secrets(forward_environment(os.environ, cluster.forward_env, {}))
    if "PYTHONPATH" not in given.values:
        return given
    values = {name: value for name, value in given.values.items() if name != "PYTHONPATH"}
    return ForwardedEnvironment(values, given.kept_back | {"PYTHONPATH": _PYTHONPATH})


def _show_forwarded(given: ForwardedEnvironment) -> None:
    if given.values:
        show_note(f"variables of this shell that go along: {', '.join(given.values)}")
    for name, why in given.kept_back.items():
        show_note(f"{name} does not go along: {why}")


def _write_log(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _exit_code(ended: RayJobResult) -> int:
    if ended.status == "STOPPED":
        show_note("the job was stopped")
        return INTERRUPTED
    if ended.status == "FAILED":
        why = ended.message.partition(", last available logs")[0]  # they were shown
        show_note(f"the job failed: {' '.join(why.split())[:500]}")
        return ended.exit_code if ended.exit_code is not None and ended.exit_code > 0 else FAILED
    return 0
