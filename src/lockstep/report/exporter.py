"""The last values of a run's metrics, for Prometheus to scrape."""

import logging
import re
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from lockstep.config.tracking import Prometheus
from lockstep.watch import waits

log = logging.getLogger(__name__)

CLOSE_S = 5.0


class Exporter:
    """A sink that answers `GET /metrics`: `lockstep_reward_mean{run="NAME"}` for `reward/mean`, and `lockstep_step`.

    It answers while the run goes on; a port that cannot be had is told and leaves the run alone."""

    def __init__(self, cfg: Prometheus, run: str) -> None:
        from prometheus_client import CollectorRegistry, start_http_server

        self._run = run
        self._lock = threading.Lock()
        self._values: dict[str, float] = {}
        self._server: Any = None
        self._thread: threading.Thread | None = None
        self.port = 0
        registry = CollectorRegistry()
        registry.register(self)
        try:
            self._server, self._thread = start_http_server(cfg.port, cfg.host, registry)
        except OSError as error:
            log.warning("prometheus cannot listen on %s:%d (%s); the run goes on", cfg.host, cfg.port, error)
            return
        self.port = int(self._server.server_port)
        log.info("prometheus: http://%s:%d/metrics", cfg.host, self.port)

    def collect(self) -> Iterator[Any]:
        """For prometheus_client, from the server's threads."""
        from prometheus_client.core import GaugeMetricFamily

        with self._lock:
            values = dict(self._values)
        for name, value in values.items():
            family = GaugeMetricFamily(metric_name(name), f"{name} of the last step", labels=["run"])
            family.add_metric([self._run], value)
            yield family

    def write(self, step: int, values: Mapping[str, float], at: float | None = None) -> None:
        with self._lock:
            by_name = {metric_name(name): name for name in self._values}
            for name in (*values, "step"):
                self._values.pop(by_name.get(metric_name(name), name), None)  # of two that look alike, the later one
            self._values |= {name: float(value) for name, value in values.items()} | {"step": float(step)}

    def close(self, reason: str = "") -> None:
        """Idempotent."""
        server, self._server = self._server, None
        if server is None or self._thread is None:
            return
        threading.Thread(target=server.shutdown, name="prometheus stop", daemon=True).start()
        try:
            waits.join(self._thread, whom="prometheus", why="its last answer", timeout_s=CLOSE_S)
        except waits.WaitTimeout:
            log.warning("prometheus did not stop within %g s", CLOSE_S)
        server.server_close()


def metric_name(name: str) -> str:
    """`lockstep_reward_mean` for `reward/mean`."""
    return "lockstep_" + re.sub(r"[^a-zA-Z0-9_]", "_", name)
