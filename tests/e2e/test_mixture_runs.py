"""Runs that train on a mixture of datasets."""

import json
from pathlib import Path
from typing import Any

import pytest
from harness import config, prompts_used, task, train

from lockstep.ledger.ledger import Ledger

pytestmark = [pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return task(tmp_path_factory.mktemp("mixture"))


def split(data: Path, first: int, weights: tuple[float, float]) -> dict[str, Any]:
    """The rows of a file as a mixture: the `first` ones, and the others in a format with other columns."""
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    others = [
        {("question" if name == "prompt" else name): value for name, value in row.items()} for row in rows[first:]
    ]
    mixture = []
    for name, part, weight in zip(("few", "many"), (rows[:first], others), weights, strict=True):
        path = data.with_name(f"{data.stem}-{name}.jsonl")
        path.write_text("".join(json.dumps(row) + "\n" for row in part))
        mixture.append({"path": str(path), "weight": weight, "label": name})
    return {"mixture": mixture}


def counts(run: Path) -> list[tuple[float, float]]:
    """How many samples of each step the two datasets gave."""
    with Ledger.reader(run) as ledger:
        return [(row.values["data/few"], row.values["data/many"]) for row in ledger.metrics_rows()]


def test_grpo_draws_each_dataset_by_its_weight_and_no_prompt_twice(folder: Path) -> None:
    values = config(folder, "grpo", name="prompts", steps=4, evaluation=None)
    data = split(Path(values["data"]["path"]), 3, (1, 1))
    run = train(folder, values | {"data": data})
    drawn, per_step = counts(run), values["prompts_per_step"]
    assert len(drawn) == 4 and {sum(each) for each in drawn} == {per_step}
    assert abs(sum(few for few, _ in drawn) - 2 * per_step) <= 3
    used = prompts_used(run)
    assert len(used) == 4 * per_step
    # The smaller dataset is in a later epoch than the larger one.
    epochs = {name: {int(uid.split(":")[0]) for uid in used if (int(uid.split(":")[1]) < 3) == (name == "few")}
              for name in ("few", "many")}  # fmt: skip
    assert max(epochs["few"]) > max(epochs["many"])


@pytest.mark.slow
def test_sft_holds_out_a_share_of_each_dataset(folder: Path) -> None:
    values = config(
        folder, "sft", name="documents", steps=3, evaluation=None, rollout={}, validation={"fraction": 0.25}
    )
    path = Path(values["data"]["path"])
    rows = len(path.read_text().splitlines())
    mixture = split(path, 4, (1, 3))["mixture"]
    for each in mixture:
        each["format"], each["answer_column"] = "prompt_answer", "completion"
    run = train(folder, values | {"data": {"mixture": mixture}})
    drawn = counts(run)
    assert {sum(each) for each in drawn} == {values["batch_size"]} and len(drawn) == 3
    assert abs(sum(few for few, _ in drawn) - 3 * values["batch_size"] / 4) <= 3
    with Ledger.reader(run) as ledger:
        (start,) = [event for event in ledger.events() if event.kind == "start"]
        assert [row.step + 1 for row in ledger.evaluations()] == [0, 3]
    assert start.fields["row_counts"] == [3, rows - 4 - round((rows - 4) / 4)]
