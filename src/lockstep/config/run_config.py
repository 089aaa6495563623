"""The fields that all recipes share: folder, seed, evaluation, tracking."""

from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from lockstep.config.cluster import ClusterConfig, LocalClusterConfig, PlacementConfig
from lockstep.config.data import DatasetConfig, ProceduralTask
from lockstep.config.fault_tolerance import RecoveryConfig, WatchConfig
from lockstep.config.model import ModelConfig
from lockstep.config.reward import RewardConfig
from lockstep.config.rollout import RolloutConfig, SamplingConfig
from lockstep.config.section import Section
from lockstep.config.trainer import CheckpointConfig, CommunicationConfig, TrainerConfig, WeightSyncConfig


class WandBConfig(Section):
    """Weights & Biases (extra `tracking`). The key comes from `WANDB_API_KEY` or `wandb login`."""

    kind: Literal["wandb"] = "wandb"
    project: str = "lockstep"
    entity: str | None = None
    """User or team; the account's default when absent."""
    group: str | None = None
    tags: tuple[str, ...] = ()
    mode: Literal["online", "offline"] = "online"
    """`offline` writes to the run's folder, for `wandb sync`."""


class MLflowConfig(Section):
    """An MLflow tracking server, or a local store (extra `tracking`)."""

    kind: Literal["mlflow"] = "mlflow"
    experiment: str = "lockstep"
    uri: str | None = None
    """`http(s)://...`, a folder, or (with the full `mlflow` package) a database; `MLFLOW_TRACKING_URI` when absent."""


class PrometheusConfig(Section):
    """The last values for Prometheus to scrape (extra `tracking`)."""

    kind: Literal["prometheus"] = "prometheus"
    host: str = "127.0.0.1"
    """Interface to listen on; whoever reaches it can read the metrics."""
    port: int = Field(9464, ge=0, le=65535)
    """0 takes any free one; the log says which."""


TrackerConfig = Annotated[WandBConfig | MLflowConfig | PrometheusConfig, Field(discriminator="kind")]


class EvaluationConfig(Section):
    """Sampled completions on held-out prompts, scored by the reward's terms and by exact match."""

    data: DatasetConfig
    every: int = Field(0, ge=0)
    """Steps between evaluations; one is always made before the first and after the last step."""
    prompts: int | None = Field(None, gt=0)
    """Number of held-out prompts; all when absent."""
    sampling: SamplingConfig | None = None
    """Other sampling than the rollout's."""
    samples_shown: int = Field(4, ge=0)


class ReportConfig(Section):
    console: bool = True
    tensorboard: bool = True
    html: bool = True


class RunConfig(Section):
    """The fields of every recipe."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    folder: str = "runs"
    """The run lives in `folder/name`."""
    seed: int = Field(0, ge=0)
    steps: int = Field(gt=0)
    model: ModelConfig
    data: DatasetConfig
    token_budget: int = Field(4096, gt=0)
    """Tokens of one packed row, the unit of memory of a micro-batch."""
    trainer: TrainerConfig = TrainerConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    evaluation: EvaluationConfig | None = None
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig | None = None
    cluster: ClusterConfig = LocalClusterConfig()
    placement: PlacementConfig = PlacementConfig()
    weights: WeightSyncConfig = WeightSyncConfig()
    communication: CommunicationConfig = CommunicationConfig()
    recovery: RecoveryConfig = RecoveryConfig()
    watch: WatchConfig = WatchConfig()
    report: ReportConfig = ReportConfig()
    tracking: tuple[TrackerConfig, ...] = ()
    """Where metrics go besides the run's folder: at most one of each kind."""

    @field_validator("tracking")
    @classmethod
    def _one_of_each(cls, trackers: tuple[TrackerConfig, ...]) -> tuple[TrackerConfig, ...]:
        kinds = [tracker.kind for tracker in trackers]
        twice = sorted({kind for kind in kinds if kinds.count(kind) > 1})
        if twice:
            raise ValueError(f"{', '.join(twice)} is there more than once")
        return trackers

    @property
    def exports(self) -> list[str]:
        """Folders within the run's that are written when it ends: `export_handle`, `adapter`, both or none."""
        chosen = self.checkpoint.export
        merged = ["export"] if chosen in (True, "merged") else []
        return merged + (["adapter"] if self.model.adapter is not None and chosen in (True, "adapter") else [])

    @model_validator(mode="after")
    def _exports_what_is_there(self) -> Self:
        if self.checkpoint.export == "adapter" and self.model.adapter is None:
            raise ValueError("checkpoint.export 'adapter' needs one: set model.adapter, or checkpoint.export=true")
        return self

    @model_validator(mode="after")
    def _quantized_weights_are_whole(self) -> Self:
        if self.model.quantization is not None and self.trainer.ranks > 1:
            raise ValueError(
                f"model.quantization needs trainer.ranks=1, got {self.trainer.ranks}: weights of bitsandbytes are not "
                "sharded; leave the quantization out to shard them"
            )
        if self.model.quantization is not None and self.trainer.offload.parameters:
            raise ValueError("model.quantization keeps its weights on the GPU: set trainer.offload.parameters=false")
        return self

    @model_validator(mode="after")
    def _takes_turns_or_goes_on(self) -> Self:
        if self.placement.shared and self.rollout.max_staleness:
            raise ValueError(
                f"placement.colocate has engines sleep while the trainer trains, and rollout.max_staleness "
                f"{self.rollout.max_staleness} has them generate meanwhile: leave one of the two out"
            )
        return self

    @model_validator(mode="after")
    def _engines_sample_so(self) -> Self:
        self.rollout.check(self.rollout.sampling, "rollout.sampling")
        if self.evaluation is not None and self.evaluation.sampling is not None:
            self.rollout.check(self.evaluation.sampling, "evaluation.sampling")
        return self

    @model_validator(mode="after")
    def _fewer_ranks_compute_the_same(self) -> Self:
        if self.recovery.fewer_ranks and self.model.adapter is not None and self.model.adapter.lora_dropout:
            raise ValueError(
                "recovery.fewer_ranks with model.adapter.lora_dropout would change the result, as which inputs are "
                "dropped depends on the rank: leave one of the two out"
            )
        return self

    @model_validator(mode="after")
    def _held_out(self) -> Self:
        """Tasks are made of seed + row: neighbouring seeds share nearly all of their rows."""
        if self.evaluation is None:
            return self
        ours, theirs = self.data, self.evaluation.data
        one, other = ours.task or ProceduralTask(), theirs.task or ProceduralTask()
        alike = ours.kind == theirs.kind == "reasoning_gym" and ours.path == theirs.path
        if alike and one.arguments == other.arguments and one.overlaps(other):
            raise ValueError(
                f"evaluation.data has rows of data: a task's row is made of its seed plus its number, and the seeds "
                f"{other.seed} to {other.seed + other.size - 1} meet those from {one.seed} to "
                f"{one.seed + one.size - 1}. Set evaluation.data.task.seed to {one.seed + one.size} or more"
            )
        return self
