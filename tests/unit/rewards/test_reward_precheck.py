"""Users' functions are found without running their code."""

from pathlib import Path

import pytest

from lockstep.config.reward import ExactMatchReward, FunctionReward
from lockstep.rewards.reward_functions import RewardFunctionError
from lockstep.rewards.reward_terms import check_terms


def check(path: str, base: Path) -> None:
    check_terms([ExactMatchReward(), FunctionReward(path=path)], base)


def test_an_existing_function_is_accepted_and_not_run(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("raise SystemExit(3)\ndef score(**_): ...\nother = score\nimport json as j\n")
    for name in ("score", "other", "j.loads"):
        check(f"a.py:{name}", tmp_path)
    (tmp_path / "b.py").write_text("from math import *\n")
    check("b.py:anything", tmp_path)
    check("json:loads", tmp_path)
    check("a:score", tmp_path)


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("a.py", "does not name a function"),
        ("a.py:scorr", "it defines score"),
        ("missing.py:score", "there is no file"),
        ("broken.py:score", "not valid Python"),
        ("no_such_package.rewards:score", "no package 'no_such_package'"),
    ],
)
def test_a_missing_function_is_refused(tmp_path: Path, path: str, words: str) -> None:
    (tmp_path / "a.py").write_text("def score(**_): ...\n")
    (tmp_path / "broken.py").write_text("def score(:\n")
    with pytest.raises(RewardFunctionError, match=words):
        check(path, tmp_path)
