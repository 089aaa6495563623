"""The settings of a DeepSpeed engine: those of a DeepSpeed JSON file, completed and compared with the run's config.

`"auto"` values are filled as transformers' Trainer does (transformers.integrations.deepspeed). A value that contradicts
the run's config is refused. Imports nothing of DeepSpeed.
"""

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, Literal

from lockstep.config.train_role import TrainRole
from lockstep.train.deepspeed.fixed_settings import FIXED, SECTIONS, fixed_names
from lockstep.train.errors import TrainerUnsupported

AUTO = "auto"
KIND = "deepspeed"
DEFAULT_STAGE = 2
_REDUCE_BUCKET = 500_000_000
"""DeepSpeed's default of `reduce_bucket_size`, in elements."""
_SCHEDULERS = ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR")
"""Those with values that `trainer.schedule` has too, as transformers' Trainer fills them."""
_FP32, _BF16 = ("fp32", "float32", "float", "torch.float32"), ("bf16", "bfloat16", "torch.bfloat16")
_FP16 = ("fp16", "float16", "half", "torch.float16")
"""DeepSpeed's names of precisions (`deepspeed.runtime.config.DtypeEnum`)."""
_STAGES = (0, 1, 2, 3)
_STAGE_PATH = "trainer.deepspeed.zero_optimization.stage"
OffloadPlace = Literal["offload_optimizer", "offload_param"]
_OFFLOAD: dict[OffloadPlace, tuple[str, int]] = {
    "offload_optimizer": ("optimizer", 1),
    "offload_param": ("parameters", 3),
}
"""The field of `trainer.offload` and the lowest stage, by DeepSpeed's section."""

_PASSED = frozenset({
    "steps_per_print", "wall_clock_breakdown", "memory_breakdown", "dump_state", "comms_logger",
    "communication_data_type", "disable_allgather",
})  # fmt: skip
"""Settings that DeepSpeed gets unchanged."""
_FILLED = frozenset({
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping", "bf16",
    "fp16", "optimizer", "scheduler", "zero_optimization", "data_types",
})  # fmt: skip
_ZERO = frozenset({
    "stage", "contiguous_gradients", "reduce_scatter", "reduce_bucket_size", "use_multi_rank_bucket_allreduce",
    "allgather_partitions", "allgather_bucket_size", "overlap_comm", "load_from_fp32_weights", "elastic_checkpoint",
    "offload_param", "offload_optimizer", "sub_group_size", "prefetch_bucket_size",
    "stage3_prefetch_bucket_size", "param_persistence_threshold", "stage3_param_persistence_threshold",
    "model_persistence_threshold", "stage3_model_persistence_threshold",
    "max_live_parameters", "stage3_max_live_parameters", "max_reuse_distance", "stage3_max_reuse_distance",
    "gather_16bit_weights_on_model_save", "stage3_gather_16bit_weights_on_model_save",
    "stage3_gather_fp16_weights_on_model_save", "use_all_reduce_for_fetch_params",
    "stage3_use_all_reduce_for_fetch_params", "allgather_sequential", "stage3_allgather_sequential",
    "ignore_unused_parameters", "round_robin_gradients", "memory_efficient_linear", "pipeline_loading_checkpoint",
    "override_module_apply", "log_trace_cache_warnings", "zero_hpz_partition_size", "zero_quantized_weights",
    "zero_quantized_gradients",
})  # fmt: skip
_SECOND_COPY = "zero_hpz_partition_size"
_QUANTIZED = ("zero_quantized_weights", "zero_quantized_gradients")
_ZERO_LACKING = {
    "zero_quantized_nontrainable_weights": "DeepSpeed quantizes frozen weights in float16 only, which is refused",
    "mics_shard_size": "the parts of MiCS are not known to its checkpoints",
    "mics_hierarchical_params_gather": "the parts of MiCS are not known to its checkpoints",
    "zenflow": "its optimizer state is not known to its checkpoints",
    "leaf_module": "leaf modules lose gradients of some models",
}


def engine_settings(
    role: TrainRole, dtype: str, hidden: int, parameters: int, device: str | None = None
) -> dict[str, Any]:
    """Returns the settings of the role's engine, complete, without `optimizer` and `scheduler`: the trainer makes them.

    Args:
        dtype: precision of forward and backward, such as `bfloat16`.
        hidden: size of the model's hidden states, from which `auto` bucket sizes follow.
        parameters: number of the model's parameters, the largest bucket that it needs.
        device: the kind of the ranks' devices, such as `cuda`; None if it is not known yet.

    Raises:
        TrainerUnsupported: a setting contradicts the run's config, or is not supported. It names both values.
    """
    settings = _Settings(role)
    given = settings.given
    settings.check_names()
    settings.check_fixed()
    clipping = role.trainer.max_grad_norm or 0.0
    settings.check("gradient_clipping", given.get("gradient_clipping", AUTO), "max_grad_norm", clipping)
    for name in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
        settings.check_batch(name)
    settings.check_precision(dtype)
    settings.check_optimizer()
    settings.check_scheduler()
    settings.check_quantized(device)
    accumulation = settings.accumulation(dtype)
    zero = settings.zero(hidden, parameters)
    return {
        **{name: value for name, value in given.items() if name in _PASSED and value not in (AUTO, None)},
        **({"data_types": {"grad_accum_dtype": accumulation}} if accumulation else {}),
        **({"zero_force_ds_cpu_optimizer": False} if offloads(role, "offload_optimizer") else {}),
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,  # the trainer says which micro-batch of a step is the last
        "gradient_clipping": clipping,
        "bf16": {"enabled": dtype == "bfloat16"},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": zero,
    }


def zero_stage(role: TrainRole) -> int:
    """Returns the stage of ZeRO that the role's settings ask for. Raises TrainerUnsupported."""
    return _Settings(role).stage()


def offloads(role: TrainRole, place: OffloadPlace) -> bool:
    """Whether state stays in host memory. Raises TrainerUnsupported."""
    settings = _Settings(role)
    return bool(settings.offload(place, settings.stage()))


def second_copy_ranks(role: TrainRole) -> int:
    """Over how many neighbouring ranks a second copy of the parameters is divided (ZeRO++, hpZ); 1 if there is none.
    Raises TrainerUnsupported."""
    return _Settings(role).second_copy()


def overlaps_reduction(role: TrainRole) -> bool:
    """Whether gradients are reduced during the backward pass at stages that need not (`overlap_comm`)."""
    return _Settings(role).section("zero_optimization").get("overlap_comm") not in (None, False, AUTO)


def may_change_layers(role: TrainRole) -> bool:
    """Whether layers may be fused or compiled under the role's settings.

    Stage 2, and stage 1 with `overlap_comm`, put gradients into their buckets in the order in which the backward pass
    computes them. With changed layers it depends on the row (an empty one runs uncompiled), and ranks would add
    gradients of different parameters. Stage 3 gathers the parameters of a module when it is called, and changed layers
    do not call their modules.
    """
    stage = zero_stage(role)
    return stage == 0 or (stage == 1 and not overlaps_reduction(role))


class _Settings:
    """A role's DeepSpeed settings, compared with the rest of its config."""

    def __init__(self, role: TrainRole) -> None:
        self.role = role
        self.given: Mapping[str, Any] = role.trainer.deepspeed or {}

    def check_fixed(self) -> None:
        """Raises TrainerUnsupported for a value that the engine would not follow, or could not run with."""
        for path, (accepted, remedy) in FIXED.items():
            *sections, name = path.split(".")
            value = self.section(*sections).get(name)
            if value not in (AUTO, None) and value not in accepted:
                raise self._unsupported(f"{path} {value!r}", remedy)

    def check_names(self) -> None:
        """Raises TrainerUnsupported for a name that is not known, or a setting that the trainer lacks."""
        self._check_section(_PASSED | _FILLED)
        self._check_section(_ZERO, "zero_optimization", lacking=_ZERO_LACKING)
        for section, names in SECTIONS.items():
            self._check_section(names, *section.split("."))

    def _check_section(self, names: frozenset[str], *path: str, lacking: Mapping[str, str] = {}) -> None:
        known = names | fixed_names(".".join(path))
        for name, value in self.section(*path).items():
            setting = ".".join((*path, name))
            if name in lacking:
                if value is True or value not in (False, None, -1, 1, AUTO):
                    raise self._unsupported(setting, f"{lacking[name]}: leave it out")
            elif name not in known:
                close = get_close_matches(name, sorted(known), 1)
                raise self._unsupported(setting, f"did you mean {close[0]}?" if close else "leave it out")

    def check(self, name: str, value: Any, field: str, own: Any) -> None:
        """Raises TrainerUnsupported if a value is neither `auto` nor that of the run's field."""
        if value in (AUTO, own) or _equal(value, own):
            return
        path, where = self.role.field(f"trainer.deepspeed.{name}"), self.role.field(f"trainer.{field}")
        remedy = f"they must agree: set {path} to auto or {own!r}, or set {where}={value!r}"
        raise TrainerUnsupported(KIND, f"{path} {value!r} with {where} {own!r}", remedy)

    def check_batch(self, name: str) -> None:
        """Rows have as many tokens as `token_budget` says, and the ranks take as many rows as the batch needs."""
        value = self.given.get(name, AUTO)
        if value != AUTO and (value != 1 or name == "train_batch_size"):
            remedy = "rows are packed up to token_budget, and the recipe sets the batch: set it to auto or leave it out"
            raise self._unsupported(f"{name} {value!r}", remedy)

    def check_precision(self, dtype: str) -> None:
        if dtype == "float16":
            field = self.role.field("model.dtype")
            raise TrainerUnsupported(KIND, f"{field} float16", f"set {field} to bfloat16 or float32")
        if self.stage() == 0 and dtype == "bfloat16":
            setting = f"{self.role.field('model.dtype')} bfloat16 at stage 0"
            path = self.role.field(_STAGE_PATH)
            raise TrainerUnsupported(KIND, setting, f"its master weights need a stage: set {path} to 1, 2 or 3")
        enabled = self.section("fp16").get("enabled", AUTO)
        if enabled not in (AUTO, False):
            remedy = "its loss scaling skips steps: set fp16.enabled to false or auto, and model.dtype to bfloat16"
            raise self._unsupported(f"fp16.enabled {enabled!r}", remedy)
        half = dtype == "bfloat16"
        enabled = self.section("bf16").get("enabled", AUTO)
        if enabled not in (AUTO, half):
            path, where = self.role.field("trainer.deepspeed.bf16.enabled"), self.role.field("model.dtype")
            wanted = "bfloat16" if enabled else "float32"
            remedy = f"they must agree: set {path} to auto, or {where}={wanted}"
            raise TrainerUnsupported(KIND, f"{path} {enabled!r} with {where} {dtype}", remedy)

    def check_optimizer(self) -> None:
        section, own = self.section("optimizer"), self.role.trainer.optimizer
        if (kind := section.get("type", "AdamW")) not in ("AdamW", "Adam"):
            raise self._unsupported(f"optimizer.type {kind!r}", "the trainer's optimizer is AdamW: set it to AdamW")
        values = {"lr": own.lr, "betas": list(own.betas), "eps": own.eps, "weight_decay": own.weight_decay}
        for name, value in self.section("optimizer", "params").items():
            if name in values:
                self.check(f"optimizer.params.{name}", value, f"optimizer.{name}", values[name])
            elif name not in ("torch_adam", "adam_w_mode", "bias_correction") or value is False:
                raise self._unsupported(f"optimizer.params.{name}", "leave it out")

    def check_scheduler(self) -> None:
        why = f"the learning rate follows {self.role.field('trainer.schedule')}"
        kind = self.section("scheduler").get("type", AUTO)
        if kind not in (AUTO, *_SCHEDULERS):
            raise self._unsupported(f"scheduler.type {kind!r}", f"{why}: leave scheduler out")
        for name, value in self.section("scheduler", "params").items():
            if value != AUTO:
                remedy = f"{why}: set it to auto, or leave scheduler out"
                raise self._unsupported(f"scheduler.params.{name} {value!r}", remedy)

    def stage(self) -> int:
        stage = self.section("zero_optimization").get("stage", DEFAULT_STAGE)
        if stage not in _STAGES or isinstance(stage, bool):
            raise self._unsupported(f"zero_optimization.stage {stage!r}", "set it to 0, 1, 2 or 3")
        return int(stage)

    def accumulation(self, dtype: str) -> str | None:
        """The precision in which gradients are accumulated; None: that of the model's parameters.

        At stage 1 every rank would have all sums in float32, twice the bytes of bfloat16: only where the settings say
        so.
        """
        given, stage = self.section("data_types").get("grad_accum_dtype"), self.stage()
        default = "fp32" if dtype == "bfloat16" and stage >= 2 else None
        if given in (AUTO, None):
            return default
        if given not in (_FP32 if dtype == "float32" else (*_FP32, *_BF16)):
            where = f"{self.role.field('model.dtype')} {dtype}"
            raise self._unsupported(f"data_types.grad_accum_dtype {given!r} with {where}", "leave it out")
        return None if dtype == "float32" else "fp32" if given in _FP32 else "bf16"

    def zero(self, hidden: int, parameters: int) -> dict[str, Any]:
        """The section `zero_optimization`, with sizes as transformers computes them. Other `auto` values are left out:
        DeepSpeed's defaults."""
        given, stage = self.section("zero_optimization"), self.stage()
        filled = {"reduce_bucket_size": hidden * hidden}
        if stage == 3:
            filled |= {
                "stage3_prefetch_bucket_size": int(0.9 * hidden * hidden),
                "stage3_param_persistence_threshold": 10 * hidden,
            }
        known = {
            name: value
            for name, value in given.items()
            if value not in (AUTO, None) and name in _ZERO and name not in _OFFLOAD
        }
        autos = {name: value for name, value in filled.items() if given.get(name) == AUTO}
        kept: dict[str, Any] = {place: section for place in _OFFLOAD if (section := self.offload(place, stage))}
        # DeepSpeed allocates whole buckets, of this size by default.
        bucket = {"reduce_bucket_size": min(_REDUCE_BUCKET, parameters)}
        return {**bucket, **known, **autos, **kept, _SECOND_COPY: self.second_copy(), "stage": stage}

    def second_copy(self) -> int:
        """The ranks over which a second copy is divided. As for DeepSpeed, 0 and 1 mean that there is none."""
        given = self.section("zero_optimization").get(_SECOND_COPY)
        if given in (AUTO, None, 0, 1):
            return 1
        setting, ranks = f"zero_optimization.{_SECOND_COPY} {given!r}", self.role.trainer.ranks
        if not isinstance(given, int) or given < 0:
            raise self._unsupported(setting, "set it to the number of GPUs of a host, or leave it out")
        self._needs_stage_3(setting)
        if ranks % min(given, ranks):
            where = f"{self.role.field('trainer.ranks')} {ranks}"
            raise self._unsupported(f"{setting} with {where}", f"set it to a number that divides {ranks}")
        return min(given, ranks)

    def check_quantized(self, device: str | None) -> None:
        """Raises TrainerUnsupported where DeepSpeed cannot quantize what the ranks send each other."""
        given = self.section("zero_optimization")
        for name in _QUANTIZED:
            if given.get(name) in (False, None, AUTO):
                continue
            setting = f"zero_optimization.{name} {given[name]!r}"
            self._needs_stage_3(setting)
            if device not in ("cuda", None):
                raise self._unsupported(f"{setting} on device {device}", "its kernels need GPUs: leave it out")
        if given.get("zero_quantized_gradients") is True:
            sent, setting = self.given.get("communication_data_type"), "zero_optimization.zero_quantized_gradients"
            if sent not in _FP16:
                remedy = "its kernels read gradients as float16: set communication_data_type to fp16, or leave it out"
                raise self._unsupported(f"{setting} with communication_data_type {sent!r}", remedy)
            if given.get("reduce_scatter") is False:
                remedy = "it replaces reduce_scatter: leave one of them out"
                raise self._unsupported(f"{setting} with reduce_scatter False", remedy)

    def _needs_stage_3(self, setting: str) -> None:
        if self.stage() != 3:
            remedy = f"it needs stage 3: set {self.role.field(_STAGE_PATH)}=3, or leave it out"
            raise self._unsupported(f"{setting} at stage {self.stage()}", remedy)

    def offload(self, place: OffloadPlace, stage: int) -> dict[str, Any]:
        """A section that keeps state in host memory, because it says so or `trainer.offload` does; else empty."""
        given = self.section("zero_optimization", place)
        section = {name: value for name, value in given.items() if value not in (AUTO, None)}
        part, lowest = _OFFLOAD[place]
        field, wanted = self.role.field(f"trainer.offload.{part}"), bool(getattr(self.role.trainer.offload, part))
        device = section.setdefault("device", "cpu" if wanted else "none")
        if device not in ("none", "cpu"):
            remedy = "it would need DeepSpeed's operation async_io: set it to cpu or none"
            raise self._unsupported(f"zero_optimization.{place}.device {device!r}", remedy)
        if wanted and device == "none":
            path = self.role.field(f"trainer.deepspeed.zero_optimization.{place}.device")
            remedy = f"they must agree: set {path} to auto or cpu, or set {field}=false"
            raise TrainerUnsupported(KIND, f"{path} 'none' with {field} true", remedy)
        if device == "cpu" and stage < lowest:
            remedy = f"it needs stage {lowest} or more: set {self.role.field(_STAGE_PATH)}={lowest}"
            if wanted:
                raise TrainerUnsupported(KIND, f"{field} at stage {stage}", f"{remedy}, or set {field}=false")
            raise self._unsupported(f"zero_optimization.{place} at stage {stage}", f"{remedy}, or leave it out")
        return section if device == "cpu" else {}

    def section(self, *path: str) -> Mapping[str, Any]:
        """The settings of a section; empty if it is absent."""
        found: Any = self.given
        for name in path:
            found = found.get(name) or {}
            if not isinstance(found, Mapping):
                where = ".".join(path)
                raise self._unsupported(f"{where} {found!r}", "it must be a JSON object")
        return found  # type: ignore[no-any-return]

    def _unsupported(self, setting: str, remedy: str) -> TrainerUnsupported:
        return TrainerUnsupported(KIND, self.role.field(f"trainer.deepspeed.{setting}"), remedy)


def _equal(value: Any, own: Any) -> bool:
    try:
        given, expected = (list(each) if isinstance(each, (list, tuple)) else [each] for each in (value, own))
        return [float(each) for each in given] == [float(each) for each in expected]
    except (TypeError, ValueError):
        return False
