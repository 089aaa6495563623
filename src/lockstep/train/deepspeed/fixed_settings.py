"""Settings of DeepSpeed that the trainer takes with one value only, and the names in their sections."""

from typing import Any

_OFFLOAD = frozenset({
    "device", "nvme_path", "buffer_count", "pin_memory", "buffer_size", "max_in_cpu", "pipeline_read", "pipeline_write",
    "fast_init", "cpuadam_cores_perc",
})  # fmt: skip
SECTIONS = {
    "bf16": frozenset({"enabled"}),
    "data_types": frozenset({"grad_accum_dtype"}),
    "zero_optimization.offload_optimizer": _OFFLOAD,
    "zero_optimization.offload_param": _OFFLOAD,
}
"""Sections, and the names in them that are not fixed."""

_SUMS = "the trainer sums gradients as the objective says"
_GRANULARITY = (0,), "modules that are gathered as one lose gradients of some models: leave it out"
_MASTER = "master weights and optimizer state are float32, as in its checkpoints: leave it out"
_PRECISION = "the model's precision is that of model.dtype: leave it out"
FIXED: dict[str, tuple[tuple[Any, ...], str]] = {
    "prescale_gradients": ((False,), f"{_SUMS}: set it to false or leave it out"),
    "gradient_predivide_factor": ((1,), f"{_SUMS}: set it to 1 or leave it out"),
    "zero_allow_untested_optimizer": ((True,), "the optimizer is torch's AdamW: set it to true or leave it out"),
    "zero_force_ds_cpu_optimizer": (
        (False,),
        "the optimizer is torch's AdamW, also in host memory: set it to false or leave it out",
    ),
    "bf16.immediate_grad_update": ((False,), "it belongs to an optimizer that is not used: leave it out"),
    "bf16.check_grad_overflow": ((True,), "a gradient that is not finite is always refused: leave it out"),
    "bf16.bf16_master_weights_and_grads": ((False,), _MASTER),
    "bf16.bf16_optimizer_states": ((False,), _MASTER),
    "data_types.param_dtype": ((), _PRECISION),
    "data_types.buffer_dtype": ((), _PRECISION),
    "data_types.keep_in_fp32_modules": (([],), _PRECISION),
    "zero_optimization.cpu_offload": (
        (False,),
        'its new name: set zero_optimization.offload_optimizer.device to "cpu"',
    ),
    "zero_optimization.cpu_offload_param": (
        (False,),
        'its new name: set zero_optimization.offload_param.device to "cpu"',
    ),
    "zero_optimization.cpu_offload_use_pin_memory": (
        (False,),
        "its new name: set pin_memory in zero_optimization.offload_optimizer and offload_param",
    ),
    "zero_optimization.module_granularity_threshold": _GRANULARITY,
    "zero_optimization.stage3_module_granularity_threshold": _GRANULARITY,
    "zero_optimization.offload_optimizer.ratio": (
        (1,),
        "all of the optimizer is offloaded: set it to 1 or leave it out",
    ),
    "zero_optimization.offload_optimizer.super_offload": ((False,), "it needs a compiled optimizer: leave it out"),
}
"""Accepted values and the remedy, by path. `auto` and null are accepted everywhere."""


def fixed_names(section: str) -> frozenset[str]:
    """The names of a section's fixed settings; `""` is the top."""
    return frozenset(name for path in FIXED for place, _, name in [path.rpartition(".")] if place == section)
