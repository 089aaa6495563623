"""W&B and MLflow as sinks. A resumed run goes on with the run it had there: ids are kept in `tracking.json`."""

import importlib.util
import json
import logging
import math
import netrc
import os
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from lockstep.config.tracking import MLflow, Prometheus, Tracker, WandB
from lockstep.ledger.files import replace
from lockstep.report.background import CLOSE_S, Background
from lockstep.report.exporter import Exporter
from lockstep.report.sinks import Sink
from lockstep.watch.secrets import redact, redact_text, secret_values

log = logging.getLogger(__name__)

IDS = "tracking.json"
INIT_S = 20.0
"""Longest time for W&B's server to take a run on; at its exit a process waits for it."""
_PACKAGES = {"wandb": "wandb", "mlflow": "mlflow", "prometheus": "prometheus_client"}
_TOLD = ("CUDA", "NCCL", "GLOO", "TORCH", "PYTORCH", "OMP", "MKL", "LOCKSTEP", "TOKENIZERS", "SLURM")
"""Beginnings of the variables that say what a run ran on."""
_LONGEST_PARAM = 500
"""Characters of a value; what old MLflow servers take."""


class TrackingError(ValueError):
    """A tracker that cannot be used, and what would help."""

    def __init__(self, kind: str, problem: str, remedy: str) -> None:
        super().__init__(f"tracking {kind}: {problem}; {remedy}")
        self.kind, self.problem, self.remedy = kind, problem, remedy


def check_trackers(trackers: Sequence[Tracker], environment: Mapping[str, str] = os.environ) -> None:
    """Raises TrackingError for a package or a key that is missing. Asks no server."""
    for tracker in trackers:
        package = _PACKAGES[tracker.kind]
        if importlib.util.find_spec(package) is None:
            raise TrackingError(tracker.kind, f"needs the package {package}", "pip install 'lockstep-rl[tracking]'")
        if isinstance(tracker, WandB) and tracker.mode == "online" and not _has_wandb_key(environment):
            remedy = "export WANDB_API_KEY, run `wandb login`, or set mode: offline"
            raise TrackingError("wandb", "there is no key", remedy)
        if isinstance(tracker, MLflow):
            _check_uri(tracker.uri or environment.get("MLFLOW_TRACKING_URI"))


def open_trackers(trackers: Sequence[Tracker], folder: Path, config: Mapping[str, Any], versions: Any) -> list[Sink]:
    """The sinks; those that speak to servers in the background."""
    known = secret_values(os.environ)
    about = redact({"config": dict(config), "versions": versions, "environment": environment_facts()}, known)
    sinks: list[Sink] = []
    for tracker in trackers:
        if isinstance(tracker, Prometheus):
            sinks.append(Exporter(tracker, str(config["name"])))
        else:
            sinks.append(_background(tracker, folder, about, known))
    return sinks


def environment_facts(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables that say what a run ran on."""
    return {name: value for name, value in sorted(environment.items()) if name.startswith(_TOLD)}


def _background(tracker: WandB | MLflow, folder: Path, about: dict[str, Any], known: tuple[str, ...]) -> Background:
    def opened() -> Sink:
        return WandBSink(tracker, folder, about) if isinstance(tracker, WandB) else MLflowSink(tracker, folder, about)

    return Background(tracker.kind, opened, known)


class WandBSink:
    """Rows with their step as an own value: W&B itself only counts up, and a resumed run may do steps again.

    Where the server cannot be had at the start, the run is written to its folder, for `wandb sync`."""

    def __init__(self, cfg: WandB, folder: Path, about: Mapping[str, Any]) -> None:
        os.environ.setdefault("WANDB_SILENT", "true")
        import wandb

        resumed = _known_id(folder, "wandb")
        id = resumed or secrets.token_hex(6)
        _keep_id(folder, "wandb", id)
        try:
            self._run = self._started(cfg, folder, about, id, cfg.mode)
        except wandb.errors.Error as error:
            if cfg.mode == "offline":
                raise
            why = redact_text(str(error), secret_values(os.environ))
            log.warning("wandb cannot be reached (%s): the run writes to %s, for `wandb sync`", why, folder / "wandb")
            own = secrets.token_hex(6)  # the service of this process holds on to the other id
            if not resumed:
                _keep_id(folder, "wandb", own)
            self._run = self._started(cfg, folder, about, own, "offline")
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")

    def _started(self, cfg: WandB, folder: Path, about: Mapping[str, Any], id: str, mode: str) -> Any:
        import wandb

        settings = wandb.Settings(
            mode=mode,
            console="off",
            silent=True,
            disable_git=True,
            save_code=False,
            init_timeout=INIT_S,
            finish_timeout=0.8 * CLOSE_S,
            x_disable_meta=True,  # the command line, among others
            x_save_requirements=False,
        )
        return wandb.init(
            project=cfg.project,
            entity=cfg.entity,
            group=cfg.group,
            tags=list(cfg.tags),
            name=str(about["config"]["name"]),
            id=id,
            resume="allow",
            dir=str(folder),
            config=dict(about),
            settings=settings,
        )

    def write(self, step: int, values: Mapping[str, float], at: float | None = None) -> None:
        self._run.log({"step": step, **values})

    def close(self, reason: str = "") -> None:
        self._run.summary["exit_reason"] = reason.partition(":")[0]
        self._run.finish(exit_code=1 if reason.startswith("failed") else 0)


class MLflowSink:
    """One MLflow run, by the client, without MLflow's global state."""

    def __init__(self, cfg: MLflow, folder: Path, about: Mapping[str, Any]) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # a folder was asked for
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "15")  # instead of two minutes, seven times
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "3")
        from mlflow import MlflowClient
        from mlflow.entities import Metric

        self._metric = Metric
        self._client = MlflowClient(tracking_uri=cfg.uri)
        self._id = _known_id(folder, "mlflow") or ""
        if self._id:
            self._client.update_run(self._id, status="RUNNING")
            return
        found = self._client.get_experiment_by_name(cfg.experiment)
        experiment = found.experiment_id if found is not None else self._client.create_experiment(cfg.experiment)
        run = self._client.create_run(experiment, run_name=str(about["config"]["name"]))
        self._id = run.info.run_id
        _keep_id(folder, "mlflow", self._id)
        for name, value in _flat("", about):
            self._client.log_param(self._id, _mlflow_name(name), str(value)[:_LONGEST_PARAM])

    def write(self, step: int, values: Mapping[str, float], at: float | None = None) -> None:
        moment = round(1000 * (time.time() if at is None else at))
        metrics = [
            self._metric(_mlflow_name(name), float(value), moment, step)
            for name, value in values.items()
            if math.isfinite(value)
        ]
        self._client.log_batch(self._id, metrics=metrics)

    def close(self, reason: str = "") -> None:
        status = {"failed": "FAILED", "interrupted": "KILLED"}.get(reason.partition(":")[0], "FINISHED")
        self._client.set_terminated(self._id, status)


def _mlflow_name(name: str) -> str:
    return re.sub(r"[^\w\-. :/]", "_", name)


def _flat(path: str, values: Any) -> list[tuple[str, Any]]:
    if isinstance(values, Mapping):
        return [each for key, value in values.items() for each in _flat(f"{path}.{key}" if path else str(key), value)]
    if isinstance(values, list | tuple) and any(isinstance(value, Mapping) for value in values):
        return [each for index, value in enumerate(values) for each in _flat(f"{path}.{index}", value)]
    return [(path, values)]


def _ids(folder: Path) -> dict[str, str]:
    try:
        found = json.loads((folder / IDS).read_text())
    except (OSError, ValueError):
        return {}
    return dict(found) if isinstance(found, dict) else {}


def _known_id(folder: Path, kind: str) -> str | None:
    return _ids(folder).get(kind)


def _keep_id(folder: Path, kind: str, id: str) -> None:
    replace(folder / IDS, json.dumps({**_ids(folder), kind: id}, indent=2).encode() + b"\n")


def _has_wandb_key(environment: Mapping[str, str]) -> bool:
    if any(environment.get(name) for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")):
        return True
    if environment.get("WANDB_MODE") in ("offline", "disabled", "dryrun"):
        return True
    host = urlsplit(environment.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    files = [environment.get("NETRC", ""), "~/.netrc", "~/_netrc"]
    for file in (Path(each).expanduser() for each in files if each):
        try:
            if netrc.netrc(file).authenticators(host) is not None:
                return True
        except (OSError, netrc.NetrcParseError):
            continue
    return False


def _check_uri(uri: str | None) -> None:
    scheme = urlsplit(uri).scheme if uri else ""
    if scheme.startswith(("sqlite", "postgresql", "mysql", "mssql")) and not importlib.util.find_spec("sqlalchemy"):
        remedy = "pip install mlflow, or give the address of a tracking server or a folder"
        raise TrackingError("mlflow", f"a database ({scheme}) needs the full mlflow package", remedy)
