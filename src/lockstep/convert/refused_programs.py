"""Programs of OpenRLHF, verl and TRL that have no counterpart here, and what there is instead."""

import re
from collections.abc import Mapping

from lockstep.convert.errors import NotConvertible

_DISTILLATION = (
    "knowledge distillation has no recipe here: recipe sft learns the completions of a teacher, which `lockstep "
    "generate` writes, without its probabilities"
)
_PROCESS_REWARDS = (
    "process reward models, which score every step of a solution, have no recipe here: recipe reward trains models "
    "that score whole completions"
)
_GAMES = "has no recipe here: recipe online_dpo learns from sampled pairs that a reward model or a judge compares"
_OLD_LOSS = "of TRL is not converted: it is recipe preference with loss.type"
_REASONS: Mapping[str, Mapping[str, str]] = {
    "openrlhf": {
        r"train_kd|train_opd": _DISTILLATION,
        r"train_prm": _PROCESS_REWARDS,
        r"train_kto": "train_kto is not converted: it is recipe preference with loss.type kto, on rows with `prompt`, "
        "`completion` and `label`",
        r"train_ppo|train_grpo": "training without Ray is not converted: only train_ppo_ray, which newer versions have",
        r"train_es_ray": "evolution strategies have no recipe here",
        r"batch_inference": "it trains nothing by itself: `lockstep generate` writes completions, and a script that "
        "also starts train_dpo or train_sft on them is converted as a whole",
    },
    "trl": {
        r"xpo": f"XPO {_GAMES}",
        r"nash_md": f"Nash-MD {_GAMES}",
        r"prm": _PROCESS_REWARDS,
        r"gkd|gold\w*|minillm|distillation|\w*_distillation\w*|sdft|sdpo": _DISTILLATION,
        r"orpo": f"ORPO {_OLD_LOSS} orpo",
        r"cpo": f"CPO {_OLD_LOSS} cpo, or cpo-simpo for SimPO",
        r"alphapo": f"AlphaPO {_OLD_LOSS} alphapo",
        r"bco": "BCO of single completions has no counterpart: recipe preference has loss.type bco_pair, for pairs",
        r"ppo\w*": "PPO of TRL is not converted: it is recipe ppo, with a reward model in reward.terms",
        r"ddpo|alignprop": "diffusion models are not trained here",
        r"vllm_serve|sglang_serve|env|chat": "it trains nothing: a run starts its engines itself",
    },
    "verl": {
        r"main_generation\w*|main_eval": "it trains nothing: use `lockstep generate` or `lockstep eval`",
        r"main_spin": "SPIN has no recipe here: recipe online_dpo learns from pairs of sampled completions by their "
        "rewards",
        r"main_sppo": "SPPO has no recipe here: recipe online_dpo with loss.type sppo_hard is the nearest",
        r"main_prime": "PRIME's implicit process rewards have no recipe here: recipe grpo with advantage.kind rloo has "
        "its outcome rewards",
    },
}
"""What to say of a program, by a pattern of its name without packages and `.py`."""


def check_convertible(framework: str, program: str) -> None:
    """Raises NotConvertible if a program is known to have no counterpart."""
    name = program.removesuffix(".py").rpartition(".")[2].lower().replace("-", "_")
    for pattern, reason in _REASONS[framework].items():
        if re.fullmatch(pattern, name):
            raise NotConvertible(f"{program}: {reason}")
