"""Users' functions are found without running their code."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.config.reward import ExactMatchReward, FunctionReward
from lockstep.data.samples import Prompt
from lockstep.rewards.reward_signatures import RewardFunctionError
from lockstep.rewards.reward_terms import check_term_columns, check_terms, data_columns


def check(path: str, base: Path) -> None:
    check_terms([ExactMatchReward(), FunctionReward(path=path)], base)


def test_an_existing_function_is_accepted_and_not_run(tmp_path: Path) -> None:
    text = "raise SystemExit(3)\ndef score(completions, **_): ...\nother = score\nimport json as j\n"
    (tmp_path / "a.py").write_text(text)
    for name in ("score", "other", "j.loads"):
        check(f"a.py:{name}", tmp_path)
    (tmp_path / "b.py").write_text("from math import *\n")
    check("b.py:anything", tmp_path)
    check("json.decoder:JSONDecoder", tmp_path)
    check("a:score", tmp_path)


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("a.py", "does not name a function"),
        ("a.py:scorr", "did you mean 'score'. It defines score"),
        ("a.py:other", "it defines score"),
        ("aa.py:score", "there is no file .*; did you mean 'a.py'"),
        ("missing.py:score", "there is no file"),
        ("wrong.py:score", "fit none of the known signatures"),
        ("broken.py:score", "not valid Python"),
        ("no_such_package.rewards:score", "no package 'no_such_package'"),
    ],
)
def test_a_missing_function_is_refused(tmp_path: Path, path: str, words: str) -> None:
    (tmp_path / "a.py").write_text("def score(completions, **_): ...\n")
    (tmp_path / "broken.py").write_text("def score(:\n")
    (tmp_path / "wrong.py").write_text("def score(text): ...\n")
    with pytest.raises(RewardFunctionError, match=words):
        check(path, tmp_path)


SOURCE = """
raise SystemExit("never run")
def trl(completions, levl, **kwargs): ...
def default(completions, levl=1, **kwargs): ...
def anything(completions, **kwargs): ...
def answered(completions, solution): ...
def keyword(completions, *, level): ...
async def verl(data_source, solution_str, ground_truth, extra_info=None): ...
def batch(data_sources, solution_strs, ground_truths, extra_infos): ...
def openrlhf(queries, prompts, labels, levl): ...
@decorated
def wrapped(completions, levl): ...
class Judge:
    def __call__(self, completions, levl): ...
judge = Judge()
def twice(completions, levl): ...
def twice(completions): ...
"""


def columns_checked(base: Path, name: str, answer: Any = "7", **arguments: Any) -> None:
    (base / "rewards.py").write_text(SOURCE)
    row = Prompt("0:0", 0, np.zeros(1, np.int32), "p", answer=answer, columns={"level": 1, "data_source": "x"})
    term = FunctionReward(path=f"rewards.py:{name}", arguments=arguments)
    check_term_columns([term], [data_columns("train.jsonl", ["topic"], row)], base)


@pytest.mark.parametrize(
    "name", ["default", "anything", "answered", "keyword", "verl", "batch", "wrapped", "judge", "twice"]
)
def test_functions_whose_columns_exist_or_are_unknown_are_accepted(tmp_path: Path, name: str) -> None:
    columns_checked(tmp_path, name)


@pytest.mark.parametrize("name", ["trl", "openrlhf"])
def test_a_column_that_the_data_lacks_is_refused_without_running_code(tmp_path: Path, name: str) -> None:
    words = (
        "requires the column 'levl', which train.jsonl does not have .did you mean 'level'..; it has data_source, "
        "level, topic, the answer; add the column, or set it under the term's `arguments`"
    )
    with pytest.raises(RewardFunctionError, match=words):
        columns_checked(tmp_path, name)
    columns_checked(tmp_path, name, levl=3)


@pytest.mark.parametrize(("name", "column"), [("answered", "solution"), ("verl", "ground_truth")])
def test_a_function_that_needs_answers_is_refused_without_them(tmp_path: Path, name: str, column: str) -> None:
    with pytest.raises(RewardFunctionError, match=f"requires the column '{column}'"):
        columns_checked(tmp_path, name, answer=None)
