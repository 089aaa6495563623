"""`lockstep.score` and `lockstep.pack`."""

from typing import Any

import numpy as np
import pytest

import lockstep
from lockstep.data.samples import Completion, Document, Group, Prompt

ROWS = [
    {"prompt": "1+1=", "completion": "2", "answer": "2", "level": 3},
    {"prompt": "2+2=", "completion": "5", "answer": "4", "level": 1},
]


def group(uid: str, sizes: list[int]) -> Group:
    tokens = np.arange(3, dtype=np.int32)
    completions = [
        Completion(
            f"{uid}/{k}", np.full(n, k, np.int32), np.zeros(n, np.float32), np.zeros(n, np.int32), "stop", "x" * n
        )
        for k, n in enumerate(sizes)
    ]
    return Group(Prompt(uid, 0, tokens, "p"), completions)


def test_rows_are_scored_with_functions_and_terms() -> None:
    def leveled(completions: list[str], level: list[int], log_metric: Any, **columns: Any) -> list[float]:
        log_metric("length", [len(each) for each in completions])
        return [float(each) for each in level]

    scores = lockstep.score(ROWS, [leveled, {"kind": "exact_match", "weight": 0.5}])
    assert scores.rewards.tolist() == [3.5, 1.0] and scores.rewards.dtype == np.float32
    assert {name: values.tolist() for name, values in scores.terms.items()} == {
        "leveled": [3.0, 1.0], "leveled/length": [1.0, 1.0], "exact_match": [1.0, 0.0],
    }  # fmt: skip


def test_groups_are_scored_in_their_order() -> None:
    scores = lockstep.score([group("0:0", [1, 2]), group("0:1", [3, 4])], {"kind": "length", "soft": 2, "hard": 4})
    assert scores.rewards.tolist() == [0.0, 0.0, -0.5, -1.0]


def test_a_function_that_raises_is_named_with_its_sample() -> None:
    def compute_score(data_source: Any, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
        if solution_str == "5":
            raise ZeroDivisionError("no")
        return 1.0

    rows = [{**row, "data_source": "sums"} for row in ROWS]
    with pytest.raises(lockstep.RewardError, match="compute_score: raised ZeroDivisionError: no") as caught:
        lockstep.score(rows, compute_score)
    assert caught.value.row == 1 and caught.value.completion == "5"


@pytest.mark.parametrize(
    ("rows", "rewards", "problem"),
    [
        ([], [{"kind": "exact_match"}], "nothing to score"),
        (ROWS, [], "nothing to score"),
        (ROWS, {"kind": "length", "soft": 1, "hard": 2}, "the term `length` counts tokens"),
        ([{"prompt": "a"}], {"kind": "exact_match"}, "row 0 has no `completion`"),
        ([{"completion": "a"}], {"kind": "exact_match"}, "prompt"),
    ],
)
def test_what_cannot_be_scored_is_refused(rows: Any, rewards: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        lockstep.score(rows, rewards)


def test_groups_are_packed_with_their_advantages() -> None:
    groups = [group("0:0", [1, 2]), group("0:1", [3, 1])]
    batch = lockstep.pack(groups, [[0.5, -0.5], [1.0, -1.0]], token_budget=16)
    assert batch.targets == 7 and sorted(set(batch.fields["advantage"].tolist())) == [-1.0, -0.5, 0.5, 1.0]
    assert sum(len(row.tokens) for row in batch.everything().by_rank[0]) == 2 * 3 + 7, "prompts are there once"
    repeated = lockstep.pack(groups, [[0.5, -0.5], [1.0, -1.0]], token_budget=16, mode="block")
    assert sum(len(row.tokens) for row in repeated.everything().by_rank[0]) == 4 * 3 + 7


def test_documents_are_packed() -> None:
    document = Document("0:0", 0, np.arange(4, dtype=np.int32), np.array([False, True, True, True]))
    assert lockstep.pack([document]).targets == 3
    with pytest.raises(ValueError, match="documents have no advantages"):
        lockstep.pack([document], [[1.0]])
