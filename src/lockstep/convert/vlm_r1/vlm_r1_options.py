"""The options of VLM-R1's `grpo_jsonl.py` and `grpo_rec.py` that TRL does not have, or has with other defaults."""

from collections.abc import Mapping

from lockstep.doctor.configs.option_tables import OptionSpec
from lockstep.doctor.configs.trl_settings import trl_options

_OWN = (
    OptionSpec("data_file_paths"),
    OptionSpec("image_folders"),
    OptionSpec("image_root"),
    OptionSpec("arrow_cache_dir"),
    OptionSpec("val_split_ratio", "float", 0.0),
    OptionSpec("reward_funcs", "list", ["accuracy", "format"], nargs="+"),
    OptionSpec("reward_method"),
    OptionSpec("task_type"),
    OptionSpec("is_reward_customized_from_vlm_module", "bool", False),
    OptionSpec("max_pixels", "int", 12845056),
    OptionSpec("min_pixels", "int", 3136),
    OptionSpec("max_anyres_num", "int", 12),
    OptionSpec("freeze_vision_modules", "bool", False),
)
_DEFAULTS = {
    "beta": 0.04,
    "epsilon": 0.2,
    "learning_rate": 1e-6,
    "loss_type": "grpo",
    "max_completion_length": 256,
    "max_prompt_length": None,
    "num_generations": 8,
    "scale_rewards": "group",
    "temperature": 1.0,
    "top_k": 50,
    "gradient_checkpointing": False,
    "use_bias_correction_kl": False,
}
"""Those of its own copy of TRL's GRPOConfig, and of the generation that its trainer fixes."""


def vlm_r1_options() -> Mapping[str, OptionSpec]:
    """All options of VLM-R1's scripts, by name."""
    options = trl_options("grpo")
    for name, default in _DEFAULTS.items():
        kind = options[name].type if name in options else "any"
        options[name] = OptionSpec(name, kind, default)
    return {**options, **{option.name: option for option in _OWN}}
