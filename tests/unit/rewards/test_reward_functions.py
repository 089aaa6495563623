"""Users' functions: loading them, detecting their signature, calling them, and validating their results."""

from pathlib import Path

import pytest
from reward_samples import batch, prompt

from lockstep.rewards.reward_functions import CALL_ADAPTERS
from lockstep.rewards.reward_signatures import RewardFunctionError, load_reward_function
from lockstep.rewards.reward_values import BadReward

FUNCTIONS = Path(__file__).parent / "functions"


def call(path, texts, prompts, signature="auto", step=0, **arguments):
    function = load_reward_function(path, signature, arguments, FUNCTIONS)
    finished = []
    scores = CALL_ADAPTERS[function.signature](function, batch(prompts, texts, step), finished.append)
    assert sum(finished) == sum(len(group) for group in texts)
    return scores, finished


def test_trl_conversational_completions_are_messages():
    texts = [["<think>a</think>b", "b"]]
    scores, finished = call("trl_rewards.py:format_reward", texts, [prompt(messages=True)])
    assert scores.values == [1.0, 0.0]
    assert finished == [2]


def test_trl_columns_are_repeated_per_completion_and_none_means_not_applicable(capsys):
    prompts = [prompt(0, solution="4"), prompt(1, solution="")]
    scores, _ = call("trl_rewards.py:accuracy", [["4", "5"], ["x", "y"]], prompts)
    assert scores.values == [1.0, 0.0, None, None]
    assert "scoring 4" in capsys.readouterr().out


@pytest.mark.parametrize("column", ["answer", "solution"])
def test_trl_functions_find_the_answer_under_its_usual_names(column):
    scores, _ = call("trl_rewards.py:accuracy", [["4", "5"]], [prompt(answer="4")])
    assert scores.values == [1.0, 0.0]


def test_trl_token_ids_state_and_logging():
    scores, _ = call("trl_rewards.py:lengths", [["abc", "a"]], [prompt()], step=2)
    assert scores.values == [203.0, 201.0]
    assert scores.extras == {"first": [0.0, 0.0], "longest": [3.0, 3.0]}


def test_trl_async():
    scores, _ = call("trl_rewards.py:judged", [["a"], ["b"]], [prompt(0, level=1), prompt(1, level=4)])
    assert scores.values == [0.5, 2.0]


def test_trl_a_function_without_kwargs_gets_its_parameters():
    scores, _ = call("trl_rewards.py:strict", [["a"]], [prompt(level=3, other="x")])
    assert scores.values == [3.0]


def test_trl_a_function_with_kwargs_only():
    rows = [prompt(answer="1", level=3, prompt="hidden")]
    scores, _ = call("trl_rewards.py:everything", [["a", "b"]], rows, signature="trl")
    assert scores.values == [1.0, 1.0]


def test_verl_float_and_progress_per_sample():
    rows = [prompt(answer="1234", data_source="openai/gsm8k")]
    scores, finished = call("verl_rewards.py:compute_score", [["#### 1,234", "1234", "#### 5"]], rows)
    assert scores.values == [1.0, 0.0, 0.0]
    assert finished == [1, 1, 1]


def test_verl_dict_numbers_go_to_the_breakdown_and_samples_do_not_share_extra_info():
    info = {"index": 1}
    rows = [prompt(answer="4", data_source="x", extra_info=info)]
    scores, _ = call("verl_rewards.py:with_details", [["a4", "a5"]], rows, penalty=0.5)
    assert scores.values == [0.5, -0.5]
    assert scores.extras == {"acc": [1.0, 0.0], "seen": [1.0, 1.0], "only_correct": [1.0, None]}
    assert info == {"index": 1}


def test_verl_ground_truth_in_its_own_column():
    rows = [prompt(data_source="x", extra_info={}, reward_model={"style": "rule", "ground_truth": "4"})]
    scores, _ = call("verl_rewards.py:with_details", [["a4", "a5"]], rows)
    assert scores.values == [1.0, 0.0]


def test_verl_batch():
    info = {"index": 1}
    rows = [prompt(0, answer="4", data_source="x", extra_info=info), prompt(1, answer="6")]
    scores, finished = call("verl_rewards.py:compute_scores", [["a4", "a5"], ["6"]], rows, penalty=0.5)
    assert scores.values == [1.0, -0.5, 1.0]
    assert scores.extras == {"acc": [1.0, 0.0, 1.0]}
    assert finished == [3] and info == {"index": 1}


@pytest.mark.parametrize(
    ("name", "words", "position"),
    [("short", "returned 1 value for 2 samples", None), ("unscored", "returned a dict without 'score'", 1)],
)
def test_invalid_results_of_verls_batches_are_errors(name, words, position):
    with pytest.raises(BadReward, match=words) as caught:
        call(f"verl_rewards.py:{name}_batch", [["a", "b"]], [prompt(answer="4")])
    assert caught.value.position == position


def test_verl_async_keeps_the_order():
    rows = [prompt(answer="", data_source="x")]
    texts = ["0" * length for length in range(1, 9)] + ["1"]
    scores, finished = call("verl_rewards.py:compute_score_async", [texts], rows)
    assert scores.values == [1, 2, 3, 4, 5, 6, 7, 8, 1]
    assert finished == [1] * 9


def test_verl_async_failure_names_the_sample():
    rows = [prompt(answer="", data_source="x")]
    with pytest.raises(BadReward, match="RuntimeError: judge says no") as caught:
        call("verl_rewards.py:compute_score_async", [["a", "boom", "b0"]], rows)
    assert caught.value.position == 1
    assert "compute_score_async" in caught.value.traceback


def test_an_instance_that_can_be_called():
    rows = [prompt(answer="a", data_source="x")]
    scores, _ = call("verl_rewards.py:judge", [["a", "b"]], rows)
    assert scores.values == [3.0, 0.0]


def test_verl_data_source_may_come_from_the_arguments():
    rows = [prompt(answer="7")]
    scores, _ = call("verl_rewards.py:compute_score", [["#### 7"]], rows, data_source="openai/gsm8k")
    assert scores.values == [1.0]
    with pytest.raises(BadReward, match="requires the column 'data_source'") as caught:
        call("verl_rewards.py:compute_score", [["#### 7"]], rows)
    assert caught.value.position == 0


def test_openrlhf_dict():
    scores, finished = call("openrlhf_rewards.py:reward_func", [["4", "55"]], [prompt(answer="4")], scale=2.0)
    assert scores.values == [2.0, 0.0]
    assert scores.extras == {"scores": [1.0, 0.0], "length": [5.0, 6.0], "flat": [7.0, 7.0]}
    assert finished == [2]


def test_openrlhf_columns_are_not_forced_on_kwargs():
    scores, _ = call("openrlhf_rewards.py:reward_func", [["4", "55"]], [prompt(answer="4", other="column")])
    assert scores.values == [1.0, 0.0]


def test_openrlhf_tensor():
    scores, _ = call("openrlhf_rewards.py:tensor", [["4", "55"]], [prompt(answer="4")])
    assert scores.values == [5.0, 6.0]


def test_openrlhf_by_position_if_the_signature_is_configured():
    rows = [prompt(answer="4")]
    scores, _ = call("openrlhf_rewards.py:renamed", [["4", "55"]], rows, signature="openrlhf")
    assert scores.values == [1.0, 2.0]
    with pytest.raises(RewardFunctionError, match="fit none"):
        call("openrlhf_rewards.py:renamed", [["4"]], rows)


def test_a_module_on_the_path(monkeypatch):
    monkeypatch.syspath_prepend(str(FUNCTIONS.parent))
    rows = [prompt(answer="a", data_source="x")]
    scores, _ = call("functions.verl_rewards:judge", [["a"]], rows)
    assert scores.values == [3.0]


@pytest.mark.parametrize(
    ("path", "position", "problem", "returned"),
    [
        ("raises", None, "raised KeyError: 'bad'", None),
        ("nan", 1, "returned NaN", "nan (float)"),
        ("infinite", 1, "not finite in float32", "1e+39 (float)"),
        ("short", None, "returned 1 value for 2 samples", "[1.0] (list)"),
        ("nothing", None, "returned None where a list of 2 numbers is expected", "None (NoneType)"),
        ("scalar", None, "returned a float where a list of 2", "1.0 (float)"),
        ("text", 0, "returned a str where a reward", "'1.0' (str)"),
        (
            "wants_column",
            0,
            "requires the column 'solutoin', which the row does not have .did you mean 'solution'",
            None,
        ),
        ("raises_each", 1, "raised KeyError", None),
        ("exits", 0, "raised SystemExit: 3", None),
        ("nothing_each", 0, "returned None where a reward", "None (NoneType)"),
        ("no_score", 0, "dict without 'score'", "{'acc': 1.0} (dict)"),
        ("out_of_memory", 0, "memory_mb", None),
    ],
)
def test_invalid_rewards_are_errors(path, position, problem, returned):
    rows = [prompt(answer="4", data_source="x", solution="4")]
    with pytest.raises(BadReward, match=problem) as caught:
        call(f"broken.py:{path}", [["good", "bad"]], rows)
    assert (caught.value.position, caught.value.returned) == (position, returned)
    if "raised" in problem:
        assert "broken.py" in caught.value.traceback
        assert "signatures.py" not in caught.value.traceback


def test_openrlhf_dict_without_rewards():
    with pytest.raises(BadReward, match="without 'rewards'"):
        call("openrlhf_rewards.py:without_rewards", [["a"]], [prompt(answer="4")])


@pytest.mark.parametrize(
    ("path", "signature", "arguments", "problem"),
    [
        ("broken.py", "auto", {}, "does not name a function"),
        ("borken.py:nan", "auto", {}, "no file .*borken.py; did you mean 'broken.py'"),
        ("broken.py:raise", "auto", {}, "has no 'raise'; did you mean 'raises'"),
        ("no_such_package.rewards:f", "auto", {}, "importing it raised ModuleNotFoundError"),
        ("unimportable.py:f", "auto", {}, "importing it raised ModuleNotFoundError.*nonexistent_module"),
        ("broken.py:not_callable", "auto", {}, "is int, which cannot be called"),
        ("broken.py:Reward", "auto", {}, "is a class"),
        ("broken.py:neither", "auto", {}, r"parameters \(text, truth\) fit none"),
        ("broken.py:both", "auto", {}, "fit the signatures of trl and openrlhf"),
        ("broken.py:neither", "verl", {}, "cannot take the signature verl"),
        ("broken.py:positional", "trl", {}, "cannot take the signature trl"),
        (
            "verl_rewards.py:with_details",
            "auto",
            {"penality": 1},
            "'penality', which is not one of its parameters; did you mean 'penalty'",
        ),
        ("trl_rewards.py:accuracy", "auto", {"completions": []}, "which the framework provides"),
        ("math:sqrt", "auto", {}, "fit none|cannot be read"),
    ],
)
def test_functions_that_cannot_be_used_are_refused_when_loaded(path, signature, arguments, problem):
    with pytest.raises(RewardFunctionError, match=problem) as caught:
        load_reward_function(path, signature, arguments, FUNCTIONS)
    assert caught.value.path == path


def test_a_failed_import_is_retried(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("syntax error")
    with pytest.raises(RewardFunctionError, match="SyntaxError"):
        load_reward_function("mine.py:f", base=tmp_path)
    file.write_text("def f(completions, **kwargs):\n    return [0.0 for _ in completions]\n")
    assert load_reward_function("mine.py:f", base=tmp_path).signature == "trl"


def test_a_file_may_import_its_neighbours(tmp_path):
    (tmp_path / "neighbour_of_rewards.py").write_text("BONUS = 2.0\n")
    (tmp_path / "mine.py").write_text(
        "from neighbour_of_rewards import BONUS\n"
        "def f(completions, **kwargs):\n    return [BONUS for _ in completions]\n"
    )
    assert load_reward_function("mine.py:f", base=tmp_path).call(["a"]) == [2.0]
