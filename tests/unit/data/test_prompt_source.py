"""Prompts of every format: their content, order and length limit."""

import json
from typing import Any

import numpy as np
import pytest
from tiny_tokenizers import BLOCKS, STRICT, TURNS, characters

from lockstep.config.data import DatasetConfig
from lockstep.data.chat_templates import TokenizerError
from lockstep.data.dataset_rows import DataError, DatasetRows
from lockstep.data.datasets import load_rows
from lockstep.data.row_lengths import LengthLimit
from lockstep.data.sample_sources import PromptSource


@pytest.fixture
def rows_of(tmp_path):
    def make(rows: list[dict], **options: Any) -> tuple[DatasetRows, DatasetConfig]:
        path = tmp_path / "data.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        cfg = DatasetConfig(path=str(path), **options)
        return load_rows(cfg), cfg

    return make


@pytest.fixture
def source(rows_of):
    def make(rows: list[dict], tokenizer: Any = None, limit: int = 200, seed: int = 0, **options: Any) -> PromptSource:
        return PromptSource(*rows_of(rows, **options), tokenizer or characters(TURNS), seed, LengthLimit(limit))

    return make


def test_prompt_and_answer(source) -> None:
    prompt = source([{"prompt": "1+1", "answer": "2", "level": {"a": 1}}]).sample(0, epoch=3)
    assert (prompt.uid, prompt.row, prompt.text, prompt.messages) == ("3:0", 0, "1+1", None)
    assert prompt.answer == "2"
    assert prompt.columns == {"answer": "2", "level": {"a": 1}}
    assert prompt.tokens.dtype == np.int32
    assert characters().decode(prompt.tokens).replace(" ", "") == "1+1"


@pytest.mark.parametrize("column", ["question", "problem", "query", "instruction"])
def test_known_names_of_prompts_and_answers(source, column) -> None:
    prompt = source([{column: "1+1", "solution": 2}]).sample(0)
    assert (prompt.text, prompt.answer) == ("1+1", 2)


def test_alpacas_input_is_a_part_of_the_prompt(source) -> None:
    data = [{"instruction": "Add.", "input": "1+1", "output": "2"}, {"instruction": "1+2", "input": "", "output": "3"}]
    first, second = (source(data).sample(row) for row in range(2))
    assert (first.text, first.answer, first.columns["input"]) == ("Add.\n1+1", "2", "1+1")
    assert (second.text, second.answer) == ("1+2", "3")
    chosen = source([{"q": "1+1", "input": "x", "output": "2"}], prompt_column="q").sample(0)
    assert (chosen.text, chosen.answer) == ("1+1", None)


def test_a_template_that_does_not_write_tools_is_refused(source) -> None:
    data = [{"messages": user("1+1"), "tools": [{"name": "f"}]}]
    with pytest.raises(DataError, match=r"does not write them\. Set model\.chat_template"):
        source(data, characters(TURNS))


def test_prompt_without_an_answer_keeps_all_columns(source) -> None:
    prompt = source([{"prompt": "x", "target_length": 7, "kind": None}]).sample(0)
    assert (prompt.answer, prompt.columns) == (None, {"target_length": 7, "kind": None})


def test_template_and_chosen_columns(source) -> None:
    data = [{"q": "1+1", "a": "2", "answer": "no", "prompt": "neither"}]
    made = source(data, template="Q: {prompt}\nA:", prompt_column="q", answer_column="a").sample(0)
    assert (made.text, made.answer) == ("Q: 1+1\nA:", "2")


def test_text_through_the_chat_template(source) -> None:
    made = source([{"prompt": "hi", "answer": "2"}], chat=True, system="be").sample(0)
    assert made.text == "<|system|>be<eos>\n<|user|>hi<eos>\n<|assistant|>"
    assert made.messages is None
    assert made.tokens.size == 11  # one token per mark and character


def test_conversation_up_to_its_last_assistant_turn(source) -> None:
    turns = [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]
    messages = [{"role": role, "content": content} for role, content in turns]
    made = source([{"messages": messages, "id": 5}]).sample(0)
    assert made.text == "<|user|>a<eos>\n<|assistant|>b<eos>\n<|user|>c<eos>\n<|assistant|>"
    assert (made.messages, made.answer, made.columns) == (messages[:3], "d", {"id": 5})
    open_end = source([{"messages": messages[:3]}]).sample(0)
    assert (open_end.text, open_end.answer) == (made.text, None)


def test_a_system_message_in_the_data_is_kept(source) -> None:
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    assert source([{"messages": messages}], system="other").sample(0).text.startswith("<|system|>s<eos>\n<|user|>u")


def test_tool_turns_and_tools_reach_the_template(source) -> None:
    template = "{% if tools %}[{{ tools[0].name }}]{% endif %}" + TURNS
    messages = [
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]},
        {"role": "tool", "content": "r"},
    ]
    template = template.replace("{{ m.content }}", "{{ m.content or m.tool_calls[0].name }}")
    for tools in ([{"name": "f"}], json.dumps([{"name": "f"}])):
        made = source([{"messages": messages, "tools": tools}], characters(template)).sample(0)
        assert made.text == "[f]<|user|>u<eos>\n<|assistant|>f<eos>\n<|tool|>r<eos>\n<|assistant|>"
    with pytest.raises(DataError, match="column 'tools': not JSON"):
        source([{"messages": messages, "tools": "[f"}], characters(template))


def test_an_unfinished_answer_is_continued(source) -> None:
    prompt = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "So"}]
    assert source([{"prompt": prompt}]).sample(0).text == "<|user|>u<eos>\n<|assistant|>So"


def test_trl_prompt_completion_of_both_kinds(source) -> None:
    made = source([{"prompt": "a", "completion": "b", "hint": 1}]).sample(0)
    assert (made.text, made.answer, made.columns) == ("a", "b", {"hint": 1})
    talk = {"prompt": [{"role": "user", "content": "a"}], "completion": [{"role": "assistant", "content": "b"}]}
    made = source([talk]).sample(0)
    assert (made.text, made.answer, made.messages) == ("<|user|>a<eos>\n<|assistant|>", "b", talk["prompt"])


def test_verl_columns_are_unchanged(source) -> None:
    row = {
        "data_source": "gsm8k",
        "prompt": [{"role": "user", "content": "q"}],
        "reward_model": {"style": "rule", "ground_truth": "72"},
        "extra_info": {"index": 0, "split": "train"},
        "ability": "math",
    }
    made = source([row]).sample(0)
    assert made.text == "<|user|>q<eos>\n<|assistant|>"
    assert made.answer == "72"
    assert made.columns == {name: value for name, value in row.items() if name != "prompt"}


def test_plain_text_is_a_prompt(source) -> None:
    assert source([{"text": "Once"}]).sample(0).text == "Once"


def test_beginning_of_sequence_only_for_plain_text(source) -> None:
    tokenizer = characters(TURNS, bos=True)
    assert source([{"prompt": "a"}], tokenizer).sample(0).tokens[0] == tokenizer.bos_token_id
    assert tokenizer.bos_token_id not in source([{"prompt": "a"}], tokenizer, chat=True).sample(0).tokens


def test_take_is_a_pure_function_of_the_position(source) -> None:
    data = [{"prompt": f"p{i}", "answer": str(i)} for i in range(7)]
    one = source(data, seed=5)
    uids = [prompt.uid for prompt in one.take(0, 21)]
    assert sorted(uids) == sorted(f"{epoch}:{row}" for epoch in range(3) for row in range(7))
    assert uids[:7] != [f"0:{row}" for row in range(7)]
    assert [p.uid for p in source(data, seed=5).take(5, 6)] == uids[5:11]
    assert [p.uid for p in source(data, seed=6).take(0, 21)] != uids
    assert one.usable_by_uid(uids[9]).text == f"p{uids[9][2:]}"
    assert [p.uid for p in source(data, shuffle=False).take(6, 2)] == ["0:6", "1:0"]


def test_long_prompts_are_refused_or_dropped(source, caplog) -> None:
    data = [{"prompt": "x" * n} for n in (3, 9, 4, 10)]
    with pytest.raises(DataError, match=r"the prompt has 9 tokens, more than the 5 that fit.*overlong") as error:
        source(data, limit=5)
    assert error.value.place == "line 2"
    made = source(data, limit=5, overlong="drop")
    assert (len(made), made.dropped) == (2, 2)
    assert sorted(prompt.row for prompt in made.take(0, 2)) == [0, 2]
    assert "2 of 4 rows are longer than 5 tokens and dropped" in caplog.text
    with pytest.raises(DataError, match="each of the 4 rows is longer than 2 tokens"):
        source(data, limit=2, overlong="drop")


def test_many_prompts_are_measured_when_they_are_used(source, monkeypatch, caplog) -> None:
    monkeypatch.setattr("lockstep.data.row_lengths.MEASURED_FIRST", 4)
    data = [{"prompt": "x" * (9 if n in (1, 5) else 3)} for n in range(8)]
    made = source(data, limit=5, overlong="drop", measure="used")
    assert (len(made), made.dropped) == (8, 0) and made._order.rows.tolist() == list(range(8))
    assert sorted(prompt.row for prompt in made.take(0, 8)) == [0, 2, 3, 4, 6, 7]  # two steps are one prompt short
    assert "row 1" in caplog.text or "line 2" in caplog.text
    with pytest.raises(DataError, match="the prompt has 9 tokens") as error:
        source(data, limit=5, measure="used", shuffle=False).take(0, 2)
    assert error.value.place == "line 2"
    bad = [{"prompt": "x" * 9} if n == 2 else {"prompt": "abc"} for n in range(8)]
    with pytest.raises(DataError, match="the prompt has 9 tokens"):  # of those that are measured first
        source(bad, limit=5, measure="used")


def test_auto_measures_all_prompts_up_to_a_number(source, monkeypatch) -> None:
    data = [{"prompt": "x" * (9 if n == 1 else 3)} for n in range(8)]
    monkeypatch.setattr("lockstep.data.row_lengths.MOST_MEASURED", 8)
    assert source(data, limit=5, overlong="drop").dropped == 1
    monkeypatch.setattr("lockstep.data.row_lengths.MOST_MEASURED", 7)
    monkeypatch.setattr("lockstep.data.row_lengths.MEASURED_FIRST", 4)
    assert source(data, limit=5, overlong="drop").dropped == 0
    assert source(data, limit=5, overlong="drop", measure="all").dropped == 1


def user(content: object) -> list[dict]:
    return [{"role": "user", "content": content}]


@pytest.mark.parametrize(
    ("bad", "column", "message"),
    [
        ({"answer": "1"}, "prompt", "the row has no such column"),
        ({"prompt": "a"}, "answer", "the row has no such column"),
        ({"prompt": "", "answer": "1"}, "prompt", "is empty"),
        ({"prompt": None, "answer": "1"}, "prompt", "is empty"),
        ({"prompt": [], "answer": "1"}, "prompt", "is empty"),
        ({"prompt": 7, "answer": "1"}, "prompt", "expected text or messages, found int"),
        ({"prompt": ["hi"], "answer": "1"}, "prompt", "message 0 is str"),
        ({"prompt": [{"speaker": "human", "value": "x"}], "answer": "1"}, "prompt", "no role"),
        ({"prompt": [{"role": "user"}], "answer": "1"}, "prompt", r"message 0 \(user\) has no content"),
    ],
)
def test_bad_rows_are_refused_with_line_and_column(source, bad, column, message) -> None:
    with pytest.raises(DataError, match=message) as error:
        source([{"prompt": "fine", "answer": "1"}, bad])
    assert (error.value.place, error.value.column) == ("line 2", column)


def test_missing_and_ambiguous_columns_are_refused(source) -> None:
    with pytest.raises(DataError, match=r"column 'promt': there is no such column. Did you mean 'prompt'\?"):
        source([{"prompt": "a"}], prompt_column="promt")
    with pytest.raises(DataError, match=r"'answer' and 'solution' could both be the answer. Set data.answer_column"):
        source([{"prompt": "a", "solution": "1", "answer": "2"}])
    with pytest.raises(DataError, match=r"'prompt' and 'question' could both be the prompt"):
        source([{"prompt": "a", "question": "1", "answer": "2"}])
    with pytest.raises(DataError, match=r"no known prompt column among x, y. .*prompt_column"):
        source([{"x": "a", "y": "1"}])
    with pytest.raises(DataError, match="column 'messages': there is no such column"):
        source([{"prompt": "a"}], format="messages")
    with pytest.raises(DataError, match="column 'completion': there is no such column"):
        source([{"prompt": "a"}], format="prompt_completion")
    verl = {"data_source": "x", "prompt": user("a"), "reward_model": {"style": "rule"}}
    with pytest.raises(DataError, match="line 1, column 'reward_model': has no ground_truth"):
        source([verl])
    with pytest.raises(DataError, match="must both be text or both be messages"):
        source([{"prompt": "a", "completion": user("x")}])
    with pytest.raises(DataError, match="nothing comes before"):
        source([{"messages": [{"role": "assistant", "content": "x"}]}])


def test_tokenizer_without_a_template_is_refused(source) -> None:
    with pytest.raises(TokenizerError, match=r"has no chat template. Set model.chat_template"):
        source([{"messages": user("a")}], characters())
    with pytest.raises(TokenizerError, match="chat template"):
        source([{"prompt": "a"}], characters(), chat=True)


def test_settings_that_do_not_fit_the_data_are_refused(source) -> None:
    with pytest.raises(DataError, match=r"data.chat is false"):
        source([{"messages": user("a")}], chat=False)
    with pytest.raises(DataError, match=r"data.template is for text"):
        source([{"messages": user("a")}], template="{prompt}")
    with pytest.raises(ValueError, match=r"does not contain \{prompt\}"):
        source([{"prompt": "a"}], template="Q:")
    with pytest.raises(ValueError, match="other braces must be doubled"):
        source([{"prompt": "a"}], template='{"q": "{prompt}"}')


def test_conversation_that_the_template_refuses(source) -> None:
    with pytest.raises(DataError, match=r"line 1: the chat template refuses the conversation: user first"):
        source([{"messages": [{"role": "system", "content": "s"}, *user("a")]}], characters(STRICT))


def test_generation_blocks_do_not_disturb_prompts(source) -> None:
    assert source([{"messages": user("a")}], characters(BLOCKS)).sample(0).text == "<|user|>a<eos><|assistant|>"


def test_a_row_without_the_answer_that_the_reward_compares_with_is_refused(rows_of) -> None:
    rows, cfg = rows_of([{"prompt": "1", "answer": "1"}, {"prompt": "2", "answer": None}])
    assert PromptSource(rows, cfg, characters(TURNS), 0, LengthLimit(9)).sample(1).answer is None
    with pytest.raises(DataError, match=r"line 2: there is no answer\. .* set data\.answer_column"):
        PromptSource(rows, cfg, characters(TURNS), 0, LengthLimit(9), answers=True)
