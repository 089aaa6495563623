"""The example functions load by themselves and say what they promise."""

from pathlib import Path

import pytest
from reward_samples import batch, prompt

from lockstep.rewards.reward_functions import CALL_ADAPTERS
from lockstep.rewards.reward_signatures import load_reward_function

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.mark.parametrize(
    ("name", "signature", "values"),
    [
        ("sorted_share", "trl", [1.0, 1 / 3, 0.0]),
        ("compute_score", "verl", [1.0, 0.0, 0.0]),
        ("reward_func", "openrlhf", [1.0, 0.0, 0.0]),
    ],
)
def test_examples(name, signature, values):
    function = load_reward_function(f"examples/rewards.py:{name}", base=EXAMPLES.parent)
    assert function.signature == signature
    rows = [prompt(answer="123", data_source="sort")]
    scores = CALL_ADAPTERS[signature](function, batch(rows, [["123", "132", "1"]]), lambda _: None)
    assert scores.values == pytest.approx(values)
    if signature != "trl":
        assert scores.extras
