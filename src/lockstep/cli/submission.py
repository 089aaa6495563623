"""What `lockstep train --submit` does: the run becomes a Ray job, its log comes here."""

import os
import shlex
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from lockstep.cli.errors import FAILED, INTERRUPTED, REFUSED, show_note, show_refusal
from lockstep.cluster.environment import Forwarded, forwarded, public
from lockstep.cluster.ray.jobs import Ended, Job, SubmissionError, follow, submit
from lockstep.config.cluster import RayCluster
from lockstep.config.recipes import GRPOConfig, SFTConfig
from lockstep.run.errors import Refused
from lockstep.run.staging import FILE, stage
from lockstep.watch.secrets import is_secret_name, kind_of

_PYTHONPATH = "it names folders of the host that submits the run"


def submit_run(
    address: str, config: SFTConfig | GRPOConfig | None, resume: Path | None, overrides: Sequence[str]
) -> int:
    """Hands the run over and follows it; the exit code is the run's own. Ctrl-C detaches, as from `ray job submit`."""
    asked: list[Job] = []
    try:
        job = _hand_over(address, config, resume, overrides, asked.append)
    except KeyboardInterrupt:
        for job in asked[-1:]:
            show_note(f"job {job.id} may have been taken. Follow it: {job.follow_again()}; stop it: {job.stop()}")
        return INTERRUPTED
    except (Refused, SubmissionError, OSError) as error:
        show_refusal(error)
        return REFUSED
    show_note(f"job {job.id} is with {job.address}")
    try:
        return _exit_code(follow(job, _emit))
    except KeyboardInterrupt:
        show_note(f"the job goes on. Follow it: {job.follow_again()}; stop it: {job.stop()}")
        return INTERRUPTED
    except SubmissionError as error:
        show_note(f"the job is not seen any more: {error}. Follow it again: {job.follow_again()}")
        return FAILED


def _hand_over(
    address: str,
    config: SFTConfig | GRPOConfig | None,
    resume: Path | None,
    overrides: Sequence[str],
    asked: Callable[[Job], None],
) -> Job:
    if resume is not None and not resume.is_absolute():
        raise Refused(f"--resume {resume} is looked for on the cluster: name it by its absolute path there")
    if config is None:
        if resume is None:
            raise Refused("name a file to train from, or a run with --resume")
        _must_be_public(overrides)
        words = ["python", "-m", "lockstep", "train", "--resume", str(resume), *overrides]
        return submit(address, resume.name, shlex.join(words), None, {}, asked)
    config = _on_ray(config)
    assert isinstance(config.cluster, RayCluster)
    given = _environment(config.cluster)
    _tell(given)
    with tempfile.TemporaryDirectory(prefix="lockstep-submit-") as folder:
        staged = stage(config, Path(folder))
        if staged.elsewhere:
            show_note(f"not sent, to be there on the cluster: {', '.join(staged.elsewhere)}")
        words = ["python", "-m", "lockstep", "train", FILE, *(["--resume", str(resume)] if resume is not None else [])]
        return submit(address, config.name, shlex.join(words), staged.folder, given.values, asked)


def _must_be_public(overrides: Sequence[str]) -> None:
    """Raises Refused for secrets: a job's command is shown to whoever sees the dashboard."""
    for override in overrides:
        name, _, value = override.partition("=")
        if value and (is_secret_name(name) or kind_of(value) is not None):
            raise Refused(
                f"{name} looks like a secret, and a job's command is shown to everybody who sees the dashboard: set it "
                "in the environment that the cluster was started with"
            )


def _on_ray(config: SFTConfig | GRPOConfig) -> SFTConfig | GRPOConfig:
    if config.cluster.kind == "ray":
        return config
    if "cluster" in config.model_fields_set:
        raise Refused("cluster.kind is local, and --submit runs on the nodes of a Ray cluster: set cluster=ray")
    show_note("cluster=ray, as the run is submitted to one and its file names none")
    return config.model_copy(update={"cluster": RayCluster()})


def _environment(cluster: RayCluster) -> Forwarded:
    """What the job's driver gets of this shell, from where it goes on to all workers."""
    given = public(forwarded(os.environ, cluster.forward_env, {}))
    if "PYTHONPATH" not in given.values:
        return given
    values = {name: value for name, value in given.values.items() if name != "PYTHONPATH"}
    return Forwarded(values, given.kept_back | {"PYTHONPATH": _PYTHONPATH})


def _tell(given: Forwarded) -> None:
    if given.values:
        show_note(f"variables of this shell that go along: {', '.join(given.values)}")
    for name, why in given.kept_back.items():
        show_note(f"{name} does not go along: {why}")


def _emit(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _exit_code(ended: Ended) -> int:
    if ended.status == "STOPPED":
        show_note("the job was stopped")
        return INTERRUPTED
    if ended.status == "FAILED":
        why = ended.message.partition(", last available logs")[0]  # they were shown
        show_note(f"the job failed: {' '.join(why.split())[:500]}")
        return ended.exit_code if ended.exit_code is not None and ended.exit_code > 0 else FAILED
    return 0
