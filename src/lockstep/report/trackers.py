"""Metric sinks for experiment trackers: W&B, MLflow, and a Prometheus exporter.

A resumed run continues its W&B or MLflow run, whose id is in `tracking.json`.
"""

import importlib.util
import json
import logging
import math
import netrc
import os
import re
import secrets
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from lockstep.base.json_text import read_json
from lockstep.base.secrets import redact, redact_text, secret_values
from lockstep.config.run_config import MLflowConfig, PrometheusConfig, TrackerConfig, WandBConfig
from lockstep.ledger.durable_files import replace_file
from lockstep.ledger.sqlite_index import CompletionSample
from lockstep.report.completion_samples import sample_record
from lockstep.report.metric_sinks import CLOSE_S, BackgroundSink, MetricSink
from lockstep.report.metrics_server import MetricsServer

log = logging.getLogger(__name__)


class PrometheusExporter:
    """Serves `GET /metrics` with `lockstep_reward_mean{run="NAME"}` for `reward/mean`, and `lockstep_step`.

    If the port is taken, it logs a warning and the run continues without it.
    """

    def __init__(self, cfg: PrometheusConfig, run: str) -> None:
        from prometheus_client import CollectorRegistry

        self._run = run
        self._lock = threading.Lock()
        self._values: dict[str, float] = {}
        self._server: MetricsServer | None = None
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self.port = 0
        try:
            self._server = MetricsServer(cfg.host, cfg.port, self._render)
        except OSError as error:
            log.warning(
                "prometheus cannot listen on %s:%d (%s); the run continues without it", cfg.host, cfg.port, error
            )
            return
        self.port = self._server.port
        log.info("prometheus: http://%s:%d/metrics", cfg.host, self.port)

    def collect(self) -> Iterator[Any]:
        """Called by prometheus_client in the server's thread."""
        from prometheus_client.core import GaugeMetricFamily

        with self._lock:
            values = dict(self._values)
        for name, value in values.items():
            family = GaugeMetricFamily(prometheus_name(name), f"{name} of the last step", labels=["run"])
            family.add_metric([self._run], value)
            yield family

    def write(self, step: int, values: Mapping[str, float], at: float | None = None) -> None:
        with self._lock:
            by_name = {prometheus_name(name): name for name in self._values}
            for name in (*values, "step"):
                self._values.pop(
                    by_name.get(prometheus_name(name), name), None
                )  # if two names are equal for Prometheus, the later one replaces the other
            self._values |= {name: float(value) for name, value in values.items()} | {"step": float(step)}

    def write_samples(self, step: int, samples: Sequence[CompletionSample]) -> None:
        """Does nothing: Prometheus has numbers only."""

    def close(self, reason: str = "") -> None:
        """Idempotent."""
        server, self._server = self._server, None
        if server is not None:
            server.close()

    def _render(self, accept: str) -> tuple[bytes, str]:
        """The metrics in the format that the scraper accepts, and its content type."""
        from prometheus_client.exposition import choose_encoder

        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type


def prometheus_name(name: str) -> str:
    """Converts the name of a metric: `reward/mean` to `lockstep_reward_mean`."""
    return "lockstep_" + re.sub(r"[^a-zA-Z0-9_]", "_", name)


IDS_FILE = "tracking.json"
INIT_S = 20.0
"""Time limit for W&B's server to accept a run. A process that exits waits for it."""
_PACKAGES = {"wandb": "wandb", "mlflow": "mlflow", "prometheus": "prometheus_client"}
_ENVIRONMENT_PREFIXES = ("CUDA", "NCCL", "GLOO", "TORCH", "PYTORCH", "OMP", "MKL", "LOCKSTEP", "TOKENIZERS", "SLURM")
"""Prefixes of the environment variables that are recorded."""
SAMPLE_COLUMNS = ("step", "prompt", "completion", "reward", "terms", "finish", "messages")
"""Columns of the table of samples."""
_MAX_PARAM_CHARS = 500
"""The longest parameter value that old MLflow servers accept."""


class TrackingError(ValueError):
    """A tracker cannot be used. `remedy` is the fix."""

    def __init__(self, kind: str, problem: str, remedy: str) -> None:
        super().__init__(f"tracking {kind}: {problem}; {remedy}")
        self.kind, self.problem, self.remedy = kind, problem, remedy


def check_trackers(trackers: Sequence[TrackerConfig], environment: Mapping[str, str] = os.environ) -> None:
    """Raises TrackingError for a missing package or key. Contacts no server."""
    for tracker in trackers:
        package = _PACKAGES[tracker.kind]
        if importlib.util.find_spec(package) is None:
            raise TrackingError(tracker.kind, f"needs the package {package}", "pip install 'lockstep-rl[tracking]'")
        if isinstance(tracker, WandBConfig) and tracker.mode == "online" and not _has_wandb_key(environment):
            remedy = "export WANDB_API_KEY, run `wandb login`, or set mode: offline"
            raise TrackingError("wandb", "no API key found", remedy)
        if isinstance(tracker, MLflowConfig):
            _check_uri(tracker.uri or environment.get("MLFLOW_TRACKING_URI"))


def open_trackers(
    trackers: Sequence[TrackerConfig], folder: Path, config: Mapping[str, Any], versions: Any
) -> list[MetricSink]:
    """Opens the sinks of trackers; those that contact servers run in the background."""
    known = secret_values(os.environ)
    run_info = redact({"config": dict(config), "versions": versions, "environment": environment_facts()}, known)
    sinks: list[MetricSink] = []
    for tracker in trackers:
        if isinstance(tracker, PrometheusConfig):
            sinks.append(PrometheusExporter(tracker, str(config["name"])))
        else:
            sinks.append(_background_sink(tracker, folder, run_info, known))
    return sinks


def environment_facts(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Returns the environment variables that are recorded."""
    return {name: value for name, value in sorted(environment.items()) if name.startswith(_ENVIRONMENT_PREFIXES)}


def _background_sink(
    tracker: WandBConfig | MLflowConfig, folder: Path, run_info: dict[str, Any], known: tuple[str, ...]
) -> BackgroundSink:
    def open_sink() -> MetricSink:
        return (
            WandBSink(tracker, folder, run_info)
            if isinstance(tracker, WandBConfig)
            else MLflowSink(tracker, folder, run_info)
        )

    return BackgroundSink(tracker.kind, open_sink, known)


class WandBSink:
    """Logs metrics to W&B. The step is a value of its own, because W&B's step only increases, and a resumed run may
    repeat steps.

    If the server cannot be reached at the start, the run is written to the run's folder, for `wandb sync`.
    """

    def __init__(self, cfg: WandBConfig, folder: Path, run_info: Mapping[str, Any]) -> None:
        os.environ.setdefault("WANDB_SILENT", "true")
        import wandb

        resumed = _stored_id(folder, "wandb")
        id = resumed or secrets.token_hex(6)
        _store_id(folder, "wandb", id)
        try:
            self._run = self._start(cfg, folder, run_info, id, cfg.mode)
        except wandb.errors.Error as error:
            if cfg.mode == "offline":
                raise
            why = redact_text(str(error), secret_values(os.environ))
            log.warning("cannot reach the wandb server (%s); writing to %s for `wandb sync`", why, folder / "wandb")
            offline_id = secrets.token_hex(6)  # wandb's service in this process still uses the other id
            if not resumed:
                _store_id(folder, "wandb", offline_id)
            self._run = self._start(cfg, folder, run_info, offline_id, "offline")
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")

    def _start(self, cfg: WandBConfig, folder: Path, run_info: Mapping[str, Any], id: str, mode: str) -> Any:
        import wandb

        settings = wandb.Settings(
            mode=mode,
            console="off",
            silent=True,
            disable_git=True,
            save_code=False,
            init_timeout=INIT_S,
            finish_timeout=0.8 * CLOSE_S,
            x_disable_meta=True,  # it includes the command line
            x_save_requirements=False,
        )
        return wandb.init(
            project=cfg.project,
            entity=cfg.entity,
            group=cfg.group,
            tags=list(cfg.tags),
            name=str(run_info["config"]["name"]),
            id=id,
            resume="allow",
            dir=str(folder),
            config=dict(run_info),
            settings=settings,
        )

    def write(self, step: int, values: Mapping[str, float], at: float | None = None) -> None:
        self._run.log({"step": step, **values})

    def write_samples(self, step: int, samples: Sequence[CompletionSample]) -> None:
        import wandb

        records = [{"step": step, **sample_record(sample)} for sample in samples]
        rows = [[_table_cell(record.get(name)) for name in SAMPLE_COLUMNS] for record in records]
        self._run.log({"step": step, "samples": wandb.Table(columns=list(SAMPLE_COLUMNS), data=rows)})

    def close(self, reason: str = "") -> None:
        self._run.summary["exit_reason"] = reason.partition(":")[0]
        self._run.finish(exit_code=1 if reason.startswith("failed") else 0)


class MLflowSink:
    """Logs metrics to an MLflow run, through the client and not MLflow's global state."""

    def __init__(self, cfg: MLflowConfig, folder: Path, run_info: Mapping[str, Any]) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # the user chose a folder
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "15")  # the default is two minutes and seven retries
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "3")
        from mlflow import MlflowClient
        from mlflow.entities import Metric

        self._metric = Metric
        self._client = MlflowClient(tracking_uri=cfg.uri)
        self._id = _stored_id(folder, "mlflow") or ""
        if self._id:
            self._client.update_run(self._id, status="RUNNING")
            return
        found = self._client.get_experiment_by_name(cfg.experiment)
        experiment = found.experiment_id if found is not None else self._client.create_experiment(cfg.experiment)
        run = self._client.create_run(experiment, run_name=str(run_info["config"]["name"]))
        self._id = run.info.run_id
        _store_id(folder, "mlflow", self._id)
        for name, value in _flatten("", run_info):
            self._client.log_param(self._id, _mlflow_name(name), str(value)[:_MAX_PARAM_CHARS])

    def write(self, step: int, values: Mapping[str, float], at: float | None = None) -> None:
        moment = round(1000 * (time.time() if at is None else at))
        metrics = [
            self._metric(_mlflow_name(name), float(value), moment, step)
            for name, value in values.items()
            if math.isfinite(value)
        ]
        self._client.log_batch(self._id, metrics=metrics)

    def write_samples(self, step: int, samples: Sequence[CompletionSample]) -> None:
        """Logs an artifact, `samples/00000020.json`."""
        records = {"step": step, "samples": [sample_record(sample) for sample in samples]}
        self._client.log_text(self._id, json.dumps(records, indent=2, default=str), f"samples/{step:08d}.json")

    def close(self, reason: str = "") -> None:
        status = {"failed": "FAILED", "interrupted": "KILLED"}.get(reason.partition(":")[0], "FINISHED")
        self._client.set_terminated(self._id, status)


def _table_cell(value: Any) -> Any:
    """A value of a table, all rows of which must have the same type in a column."""
    return value if isinstance(value, str | int | float) or value is None else json.dumps(value, default=str)


def _mlflow_name(name: str) -> str:
    return re.sub(r"[^\w\-. :/]", "_", name)


def _flatten(path: str, values: Any) -> list[tuple[str, Any]]:
    if isinstance(values, Mapping):
        return [
            each for key, value in values.items() for each in _flatten(f"{path}.{key}" if path else str(key), value)
        ]
    if isinstance(values, list | tuple) and any(isinstance(value, Mapping) for value in values):
        return [each for index, value in enumerate(values) for each in _flatten(f"{path}.{index}", value)]
    return [(path, values)]


def _read_ids(folder: Path) -> dict[str, str]:
    try:
        found = read_json(folder / IDS_FILE)
    except (OSError, ValueError):
        return {}
    return dict(found) if isinstance(found, dict) else {}


def _stored_id(folder: Path, kind: str) -> str | None:
    return _read_ids(folder).get(kind)


def _store_id(folder: Path, kind: str, id: str) -> None:
    replace_file(folder / IDS_FILE, json.dumps({**_read_ids(folder), kind: id}, indent=2).encode() + b"\n")


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
