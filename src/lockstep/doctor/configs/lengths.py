"""Heads and positions of a model against how it is cut."""

from lockstep.doctor.configs.advice import Advice
from lockstep.doctor.configs.models import Shape
from lockstep.doctor.configs.settings import Place

VLLM = "https://github.com/vllm-project/vllm/blob/v0.20.0/vllm/config/model.py"


def judge_heads(advice: Advice, shape: Shape, parallel: int, option: str, at: Place, source: str = VLLM) -> None:
    """Heads must divide over tensor-parallel ranks."""
    if shape.heads and parallel > 1 and shape.heads % parallel:
        fitting = [size for size in (1, 2, 4, 8, 16) if shape.heads % size == 0]
        advice.error(
            "parallel-heads",
            f"{option} {parallel}: {shape.name} has {shape.heads} attention heads, which do not divide by it",
            "vLLM refuses to start.",
            f"one of {', '.join(map(str, fitting))}",
            source,
            at,
        )


def judge_positions(advice: Advice, shape: Shape, longest: int | None, what: str, at: Place) -> None:
    """Longer than the model's positions."""
    if shape.longest and longest and longest > shape.longest:
        advice.error(
            "length-model",
            f"{what} of {longest} tokens: {shape.name} has {shape.longest} positions",
            "vLLM refuses a longest sequence that is beyond the model's.",
            f"at most {shape.longest}",
            VLLM,
            at,
        )
