"""Sizes of known models compared with their model cards, and findings about models of unknown shape."""

from pathlib import Path

import pytest

from lockstep.doctor.configs import model_memory
from lockstep.doctor.configs.config_settings import NO_LOCATION, ConfigFindings
from lockstep.doctor.configs.model_memory import ModelSize, find_model


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("Qwen/Qwen2-0.5B-Instruct", 0.494),
        ("Qwen/Qwen2-7B", 7.62),
        ("Qwen/Qwen2-72B-Instruct", 72.7),
        ("Qwen/Qwen2.5-Math-7B", 7.62),
        ("Qwen/Qwen2.5-Coder-1.5B-Instruct", 1.54),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B", 1.78),
        ("deepseek-ai/deepseek-llm-7b-chat", 6.91),
        ("google/gemma-7b-it", 8.54),
        ("google/gemma-2-2b-it", 2.61),
        ("google/gemma-2-27b", 27.2),
        ("google/gemma-3-1b-it", 1.0),
        ("microsoft/Phi-3-mini-128k-instruct", 3.82),
        ("microsoft/Phi-3-medium-4k-instruct", 14.0),
        ("microsoft/phi-4", 14.7),
        ("microsoft/Phi-4-mini-instruct", 3.84),
    ],
)
def test_parameters_agree_with_model_cards(name: str, billions: float) -> None:
    shape = find_model(name, Path())
    assert shape is not None and shape.layers and shape.parameters / 1e9 == pytest.approx(billions, rel=0.01)


def _findings_text(shape: ModelSize, tokens: int | None, gpu_gib: float | None) -> tuple[str, str]:
    advice = ConfigFindings()
    model_memory.judge_gpu_memory(
        advice, model_memory.TrainingStates(shape, 8), None, model_memory.BatchTokens(tokens), gpu_gib, NO_LOCATION
    )
    (found,) = advice.findings
    return found.severity, found.seen


def test_no_gpu_is_reported_as_large_enough_for_an_unknown_shape() -> None:
    unknown = find_model("somebody/their-own-7B", Path())
    assert unknown is not None and not unknown.layers
    severity, seen = _findings_text(unknown, 100_000, None)
    assert severity == "note" and "are large enough" not in seen and "GPUs below 24 GiB are too small" in seen
    assert "the model's shape is not known" in seen
    severity, seen = _findings_text(unknown, 100_000, 80.0)
    assert severity == "note" and "plus activations and logits" in seen
    known = find_model("Qwen/Qwen2-7B", Path())
    assert known is not None
    assert "number of tokens" in _findings_text(known, None, 80.0)[1]
    assert _findings_text(known, 1000, 80.0)[0] == "ok" and "are large enough" in _findings_text(known, 1000, None)[1]


def test_logits_of_verls_example_model_are_included() -> None:
    known = find_model("Qwen/Qwen2-7B-Instruct", Path())
    assert known is not None
    severity, seen = _findings_text(known, 80 * 1536, None)
    assert severity == "warning" and "of logits" in seen
