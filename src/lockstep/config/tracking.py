"""Where metrics go besides the run's folder."""

from typing import Annotated, Literal

from pydantic import Field

from lockstep.config.base import Section


class WandB(Section):
    """Weights & Biases (extra `tracking`). The key comes from `WANDB_API_KEY` or `wandb login`."""

    kind: Literal["wandb"] = "wandb"
    project: str = "lockstep"
    entity: str | None = None
    """User or team; the account's default when absent."""
    group: str | None = None
    tags: tuple[str, ...] = ()
    mode: Literal["online", "offline"] = "online"
    """`offline` writes to the run's folder, for `wandb sync`."""


class MLflow(Section):
    """An MLflow tracking server, or a local store (extra `tracking`)."""

    kind: Literal["mlflow"] = "mlflow"
    experiment: str = "lockstep"
    uri: str | None = None
    """`http(s)://...`, a folder, or (with the full `mlflow` package) a database; `MLFLOW_TRACKING_URI` when absent."""


class Prometheus(Section):
    """The last values for Prometheus to scrape (extra `tracking`)."""

    kind: Literal["prometheus"] = "prometheus"
    host: str = "127.0.0.1"
    """Interface to listen on; whoever reaches it can read the metrics."""
    port: int = Field(9464, ge=0, le=65535)
    """0 takes any free one; the log says which."""


Tracker = Annotated[WandB | MLflow | Prometheus, Field(discriminator="kind")]
