"""The fields that all recipes share: folder, seed, evaluation, tracking."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from lockstep.config.algorithm import FilterGroups, ObjectiveConfig
from lockstep.config.cluster import ClusterConfig, LocalClusterConfig, PlacementConfig
from lockstep.config.data import DatasetConfig, TrainingDataConfig, check_other_rows
from lockstep.config.fault_tolerance import RecoveryConfig, StoreConfig, WatchConfig
from lockstep.config.model import ModelConfig
from lockstep.config.reward import RewardConfig
from lockstep.config.roles import REWARD_MODEL
from lockstep.config.rollout import RolloutConfig, SamplingConfig
from lockstep.config.section import Section
from lockstep.config.serve_role import ServeRole, reward_model_roles
from lockstep.config.train_role import TrainRole
from lockstep.config.trainer import CheckpointConfig, CommunicationConfig, StepRange, TrainerConfig, WeightSyncConfig


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
    """An endpoint with the latest values for Prometheus."""

    kind: Literal["prometheus"] = "prometheus"
    host: str = "127.0.0.1"
    """Address to listen on; readable for all hosts that reach it."""
    port: int = Field(9464, ge=0, le=65535)
    """0 uses any free port, which the log names."""


TrackerConfig = Annotated[WandBConfig | MLflowConfig | PrometheusConfig, Field(discriminator="kind")]


class EvaluationConfig(Section):
    """Sampled completions on held-out prompts, scored by the reward's terms and by exact match."""

    data: DatasetConfig
    every: int = Field(0, ge=0)
    """Steps between evaluations; there is always one before the first step and one after the last."""
    prompts: int | None = Field(None, gt=0)
    """Number of held-out prompts; all when absent."""
    sampling: SamplingConfig | None = None
    """Sampling parameters for evaluation; the rollout's when absent."""
    samples_shown: int = Field(4, ge=0)


class EarlyStoppingConfig(Section):
    """Ends the run when a metric of its evaluations does not improve any more."""

    metric: str = "eval/loss"
    """A metric of `validation` (`eval/loss`) or `evaluation` (`eval/reward_mean`, `eval/exact_match`)."""
    patience: int = Field(3, gt=0)
    """The run ends after this many evaluations in a row without improvement."""
    min_delta: float = Field(0.0, ge=0)
    """A smaller difference from the best value is no improvement."""
    mode: Literal["auto", "min", "max"] = "auto"
    """Whether lower or higher is better; `auto`: lower for losses and perplexities, else higher."""

    @property
    def lower_is_better(self) -> bool:
        return self.mode == "min" or (self.mode == "auto" and self.metric.endswith(("loss", "perplexity")))


class ValidationConfig(Section):
    """The loss on held-out documents, as `eval/loss` and `eval/perplexity`, or on held-out pairs."""

    data: DatasetConfig | None = None
    """The held-out data."""
    fraction: float | None = Field(None, gt=0, lt=1)
    """Instead of `data`: this share of the training data, which is then not trained on."""
    every: int = Field(0, ge=0)
    """Steps between evaluations; there is always one before the first step and one after the last."""
    samples: int | None = Field(None, gt=0)
    """Number of held-out documents or pairs that are evaluated; all when absent."""

    @model_validator(mode="after")
    def _check_source(self) -> Self:
        if (self.data is None) == (self.fraction is None):
            raise ValueError("give either validation.data or validation.fraction")
        return self


class ReportConfig(Section):
    """What a run shows and writes about itself."""

    console: bool = True
    lines_every: int = Field(10, ge=1)
    """Steps between two lines on a terminal, where a live line shows every step (docs/console.md)."""
    lines_every_s: float = Field(10.0, ge=0)
    """Fewest seconds between the lines of two steps in files and pipes; 0 prints one for every step."""
    samples_every: int = Field(20, ge=0)
    """Steps between samples of completions in console, report and trackers, besides the first and last; 0: none."""
    samples_shown: int = Field(2, gt=0)
    """Completions of such a step, from the best to the worst."""
    tensorboard: bool = True
    html: bool = True
    timeline: StepRange | None = None
    """Steps of the run of which a timeline is captured (docs/timeline.md); `lockstep timeline RUN` shows it."""


DataKind = Literal["documents", "prompts", "pairs", "labelled"]
"""What a recipe reads its data as: documents, prompts, pairs of completions, or completions labelled as desirable."""


@dataclass(frozen=True, slots=True)
class Generation:
    """What engines generate for a step."""

    prompts_per_step: int
    group_size: int
    """Completions per prompt."""
    filter_groups: FilterGroups


@dataclass(frozen=True, slots=True)
class Export:
    """A trained model that is written when the run ends."""

    role: TrainRole
    form: Literal["export", "adapter"]
    """The model, with an adapter merged into it, or the adapter."""

    @property
    def folder(self) -> str:
        """The subfolder of the run's: `export`, or `critic/export`."""
        return f"{self.role.section}/{self.form}" if self.role.section else self.form


class RunConfig(Section):
    """The fields of every recipe."""

    recipe: str
    """The name of the recipe: `sft`, `grpo`, `ppo`, `online_dpo`, `rejection_sampling`, `preference`, `reward`."""
    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    folder: str = "runs"
    """The folder of the run is `folder/name`."""
    folder_access: Literal["private", "group", "umask"] = "private"
    """Who may use the folder of a new run: only you (mode 0700), also your group, which may resume the run (2770), or
    those that your umask admits. Files in it get the same access. A folder that exists keeps its mode."""
    seed: int = Field(0, ge=0)
    steps: int = Field(gt=0)
    model: ModelConfig
    data: TrainingDataConfig
    token_budget: int = Field(4096, gt=0)
    """Tokens per packed row, which sets the memory of a micro-batch."""
    trainer: TrainerConfig = TrainerConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    store: StoreConfig | None = None
    evaluation: EvaluationConfig | None = None
    early_stopping: EarlyStoppingConfig | None = None
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
    """Trackers for metrics besides the run's folder: at most one of each kind."""

    @field_validator("tracking")
    @classmethod
    def _check_tracking(cls, trackers: tuple[TrackerConfig, ...]) -> tuple[TrackerConfig, ...]:
        kinds = [tracker.kind for tracker in trackers]
        twice = sorted({kind for kind in kinds if kinds.count(kind) > 1})
        if twice:
            raise ValueError(f"{', '.join(twice)} is listed more than once")
        return trackers

    # What the rest of the package asks of a recipe. A recipe's class overrides what differs from these defaults.

    head: ClassVar[Literal["vocabulary", "score"]] = "vocabulary"
    """What the policy computes from its last hidden states."""

    @field_validator("model")
    @classmethod
    def _set_head(cls, model: ModelConfig) -> ModelConfig:
        if "head" in model.model_fields_set and model.head != cls.head:
            raise ValueError(f"head {model.head} does not suit this recipe, which sets it to {cls.head}: leave it out")
        return model.model_copy(update={"head": cls.head})

    @property
    def objective(self) -> ObjectiveConfig:
        """What the policy learns from."""
        raise NotImplementedError(f"{type(self).__name__} names no objective")

    @property
    def sequences_per_step(self) -> int:
        """Sequences that a step trains on."""
        raise NotImplementedError(f"{type(self).__name__} does not say how many sequences a step has")

    def starting_tokenizer(self, role: TrainRole) -> str | None:
        """The folder or hub name of the tokenizer of the model that a trained role starts from; None for that in the
        model's folder."""
        return None

    def passes_of(self, role: TrainRole) -> int:
        """Passes of a trained role over the sequences of a step; the most, if steps differ."""
        return 1

    @property
    def updates_per_step(self) -> int:
        """Optimizer steps per step."""
        return 1

    @property
    def data_kind(self) -> DataKind:
        """What `data` is read as."""
        return "documents"

    @property
    def learns_prompts(self) -> bool:
        """Whether documents are trained on with the tokens of their prompts."""
        return False

    @property
    def generation(self) -> Generation | None:
        """What engines generate for a step; None for a recipe that trains on its data."""
        return None

    @property
    def reads_margins(self) -> bool:
        """Whether pairs have a margin, in the column `margin`."""
        return False

    @property
    def scores_last_state(self) -> bool:
        """Whether a model computes a score for the text up to the last token, which takes a place after it."""
        return self.head == "score"

    @property
    def held_out_samples(self) -> ValidationConfig | None:
        """The data on which the objective is measured; None for none."""
        return None

    @property
    def validation_metrics(self) -> tuple[str, ...]:
        """What is measured on `held_out_samples` and can end the run early."""
        return ("eval/loss", "eval/perplexity")

    @property
    def train_temperature(self) -> float:
        """Divisor of the logits in training."""
        return 1.0

    @property
    def trial_overrides(self) -> dict[str, int]:
        """Settings that make a step tiny but keep placement, model, data and communicators."""
        return {}

    @property
    def train_roles(self) -> tuple[TrainRole, ...]:
        """The trained models. The first is the policy, whose weights are published and exported."""
        return (self.policy,)

    @property
    def serve_roles(self) -> tuple[ServeRole, ...]:
        """The models that are only evaluated, each in processes of its own: reward models, and what a recipe adds."""
        return tuple(reward_model_roles(self).values())

    @property
    def policy(self) -> TrainRole:
        """The model that the run is about."""
        return TrainRole(
            name="policy",
            model=self.model,
            trainer=self.trainer_of("policy", self.model, self.trainer),
            objective=self.objective,
            communication=self.communication,
            seed=self.seed,
            temperature=self.train_temperature,
            optimizer_steps=self.steps * self.updates_per_step,
            served_fields=tuple(name for role in self.serve_roles for name in role.fields) + self.precomputed_fields,
            precomputed_fields=self.precomputed_fields,
        )

    def has_placed_role(self, section: str) -> bool:
        """Whether the run has processes of a role, which `placement` calls by this name."""
        if section == "rollout":
            return self.needs_engines
        if section == REWARD_MODEL:
            return bool(reward_model_roles(self))
        return section == "policy" or getattr(self, section, None) is not None

    def device_set(self, role: str) -> tuple[str, ...]:
        """The sections of the run's roles that share devices with this one, itself included."""
        return tuple(section for section in self.placement.set_of(role) if self.has_placed_role(section))

    def trainer_of(self, role: str, model: ModelConfig, trainer: TrainerConfig) -> TrainerConfig:
        """A role's trainer, with what it offloads."""
        shared = len(self.device_set(role)) > 1
        offload = trainer.offload.resolved(shared, movable=model.quantization is None)
        return trainer.model_copy(update={"offload": offload})

    @property
    def precomputed_fields(self) -> tuple[str, ...]:
        """Fields of the objective that are computed once for all data, before the first step."""
        return ()

    @property
    def needs_engines(self) -> bool:
        """Whether the run has rollout engines: for its training, or only for its evaluation."""
        return self.generation is not None or self.evaluation is not None

    def reason_to_stop(self, committed: Mapping[str, Any]) -> str:
        """Why the run ends after a step whose commit recorded these metrics; empty if it does not."""
        return ""

    @property
    def exported_roles(self) -> tuple[str, ...]:
        """The trained models that are written when the run ends."""
        return ("policy",)

    @property
    def exports(self) -> list[Export]:
        """What is written when the run ends: models, adapters, both or none."""
        chosen, found = self.checkpoint.export, []
        for role in self.train_roles:
            if role.name in self.exported_roles and chosen in (True, "merged"):
                found.append(Export(role, "export"))
            if role.name in self.exported_roles and chosen in (True, "adapter") and role.model.adapter is not None:
                found.append(Export(role, "adapter"))
        return found

    def check_roles(self) -> None:
        """Checks the fields of all trained models, which are only known once all fields are valid. Raises ValueError
        if they contradict each other."""
        for role in self.train_roles:
            if self.recovery.fewer_ranks and role.model.adapter is not None and role.model.adapter.lora_dropout:
                raise ValueError(
                    f"recovery.fewer_ranks with {role.field('model.adapter.lora_dropout')} would change the result, "
                    "since the dropout masks depend on the rank: leave one of the two out"
                )
        if self.checkpoint.export == "adapter" and not self.exports:
            raise ValueError(
                "checkpoint.export 'adapter' needs an adapter: set model.adapter, or checkpoint.export=true"
            )

    @model_validator(mode="after")
    def _check_colocation(self) -> Self:
        if self.placement.shared and self.rollout.max_staleness:
            raise ValueError(
                f"with placement.colocate engines sleep while the trainer trains, and with rollout.max_staleness "
                f"{self.rollout.max_staleness} they generate meanwhile: leave one of the two out"
            )
        return self

    @model_validator(mode="after")
    def _check_temperatures(self) -> Self:
        self.rollout.check(self.rollout.sampling, "rollout.sampling")
        if self.evaluation is not None and self.evaluation.sampling is not None:
            self.rollout.check(self.evaluation.sampling, "evaluation.sampling")
        return self

    @model_validator(mode="after")
    def _check_early_stopping(self) -> Self:
        if self.early_stopping is None:
            return self
        of_loss = self.early_stopping.metric in self.validation_metrics
        section = "validation" if of_loss else "evaluation"
        measured = self.held_out_samples if of_loss else self.evaluation
        if measured is None or not measured.every:
            raise ValueError(
                f"early_stopping.metric {self.early_stopping.metric} is measured by {section}: set {section}.every"
            )
        return self

    @model_validator(mode="after")
    def _check_overlong(self) -> Self:
        validation = self.held_out_samples.data if self.held_out_samples is not None else None
        sections = [*self.data.sources, *filter(None, [validation])] if self.data_kind != "pairs" else []
        held_out = [] if self.evaluation is None else [self.evaluation.data]
        if any(each.overlong == "truncate" for each in sections + held_out):
            raise ValueError("overlong: truncate cuts pairs of completions, and nothing else: set it to drop or error")
        return self

    @model_validator(mode="after")
    def _check_held_out_rows(self) -> Self:
        if self.evaluation is None:
            return self
        for data in self.data.sources:
            check_other_rows(data, self.evaluation.data)
        return self
