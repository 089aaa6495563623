"""Pairs: which columns are what, their tokens, and which rows are left out."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from tiny_tokenizers import FORGETFUL, TURNS, characters

from lockstep.config.data import DatasetConfig
from lockstep.data.dataset_rows import DataError
from lockstep.data.datasets import load_rows
from lockstep.data.forest_builder import forest_from_pairs
from lockstep.data.pair_sources import LabelledSource, PairSource
from lockstep.data.row_lengths import LengthLimit
from lockstep.data.source_factory import SourceOptions, open_source


def open_pairs(
    folder: Path, rows: list[dict[str, Any]], tokenizer: Any, limit: int = 200, **options: Any
) -> PairSource:
    path = folder / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    cfg = DatasetConfig(path=str(path), shuffle=False, **options)
    return PairSource(load_rows(cfg), cfg, tokenizer, 0, LengthLimit(limit))


def texts(source: PairSource, tokenizer: Any) -> tuple[str, str, str]:
    (pair,) = source.take(0, 1)
    prompt, chosen, rejected = (
        "".join(tokenizer.convert_ids_to_tokens(each.tolist())) for each in (pair.prompt, pair.chosen, pair.rejected)
    )
    return prompt, chosen, rejected


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def model(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


CHAT = ("<|user|>ab<eos>\n<|assistant|>", "c<eos>", "d<eos>")


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"prompt": "ab", "chosen": "c", "rejected": "d"}, ("ab", "c<eos>", "d<eos>")),
        ({"question": "ab", "chosen": "c", "rejected": "d"}, ("ab", "c<eos>", "d<eos>")),
        ({"instruction": "a", "input": "b", "chosen": "c", "rejected": "d"}, ("a\nb", "c<eos>", "d<eos>")),
        ({"chosen": "H: ab A: cx", "rejected": "H: ab A: dy"}, ("H: ab A:", " cx<eos>", " dy<eos>")),
        ({"prompt": [user("ab")], "chosen": [model("c")], "rejected": [model("d")]}, CHAT),
        ({"prompt": [user("ab")], "chosen": "c", "rejected": "d"}, CHAT),
        ({"prompt": "ab", "chosen": [model("c")], "rejected": [model("d")]}, CHAT),
        ({"chosen": [user("ab"), model("c")], "rejected": [user("ab"), model("d")]}, CHAT),
        ({"prompt": "ab", "chosen": [user("ab"), model("c")], "rejected": [user("ab"), model("d")]}, CHAT),
        ({"prompt": [user("ab")], "chosen": [user("ab"), model("c")], "rejected": [user("ab"), model("d")]}, CHAT),
        (
            {
                "conversations": [{"from": "human", "value": "ab"}],
                "chosen": {"from": "gpt", "value": "c"},
                "rejected": {"from": "gpt", "value": "d"},
            },
            CHAT,
        ),
    ],
    ids=[
        "text", "question", "alpaca", "implicit text", "turns", "text completions", "text prompt", "implicit turns",
        "ultrafeedback", "prompt repeated", "llama-factory",
    ],
)  # fmt: skip
def test_every_known_form_is_read(tmp_path: Path, row: dict[str, Any], expected: tuple[str, str, str]) -> None:
    tokenizer = characters(TURNS)
    assert texts(open_pairs(tmp_path, [row], tokenizer), tokenizer) == expected


def test_a_plain_prompt_can_be_rendered_as_a_chat(tmp_path: Path) -> None:
    tokenizer = characters(TURNS)
    source = open_pairs(tmp_path, [{"prompt": "ab", "chosen": "c", "rejected": "d"}], tokenizer, chat=True)
    assert texts(source, tokenizer) == CHAT


def test_turns_of_the_prompt_are_never_lost(tmp_path: Path) -> None:
    """Completions that begin with a tool's turn continue the prompt."""
    tokenizer = characters(TURNS)
    tool = {"role": "tool", "content": "7"}
    row = {"prompt": [user("a"), model("b")], "chosen": [tool, model("c")], "rejected": [tool, model("d")]}
    prompt, chosen, rejected = texts(open_pairs(tmp_path, [row], tokenizer), tokenizer)
    assert prompt == "<|user|>a<eos>\n<|assistant|>b" and "<|tool|>7" in chosen and chosen != rejected


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [user("a")], "chosen": [model("b")], "rejected": []},
        {"chosen": [user("a"), model("b")], "rejected": [user("a")]},
        {"chosen": "a b", "rejected": ""},
    ],
    ids=["turns", "whole conversation", "text"],
)
def test_an_empty_completion_is_left_out_in_every_form(tmp_path: Path, row: dict[str, Any]) -> None:
    good = {name: value for name, value in row.items() if name == "prompt"}
    good |= {
        "chosen": row["chosen"],
        "rejected": row["chosen"][:-1] + ([model("x")] if row["chosen"] != "a b" else "c"),
    }
    source = open_pairs(tmp_path, [row, good], characters(TURNS))
    assert len(source) == 1 and source.dropped == 1


def test_several_turns_may_follow_the_prompt(tmp_path: Path) -> None:
    tokenizer = characters(TURNS)
    row = {"prompt": [user("a")], "chosen": [model("b"), user("c"), model("d")], "rejected": [model("e")]}
    expected = "<|user|>a<eos>\n<|assistant|>", "b<eos>\n<|user|>c<eos>\n<|assistant|>d<eos>", "e<eos>"
    assert texts(open_pairs(tmp_path, [row], tokenizer), tokenizer) == expected


def test_prompts_are_tokenized_alone(tmp_path: Path) -> None:
    """A merge across the end of the prompt would make a token that generation never makes."""
    tokenizer = characters(merges=("th",))
    (pair,) = open_pairs(tmp_path, [{"prompt": "at", "chosen": "he", "rejected": "o"}], tokenizer).take(0, 1)
    parts = [tokenizer.convert_ids_to_tokens(each.tolist()) for each in (pair.prompt, pair.chosen, pair.rejected)]
    assert parts == [["a", "t"], ["h", "e", "<eos>"], ["o", "<eos>"]]


def test_useless_and_overlong_pairs_are_left_out_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [
        {"prompt": "ab", "chosen": "c", "rejected": "d"},
        {"prompt": "ab", "chosen": "", "rejected": "d"},
        {"prompt": "ab", "chosen": "same", "rejected": "same"},
        {"prompt": "ab", "chosen": "c", "rejected": "d" * 30},
        {"prompt": "ab", "chosen": "e", "rejected": "f"},
    ]
    with caplog.at_level(logging.WARNING):
        source = open_pairs(tmp_path, rows, characters(), limit=20, overlong="drop")
    assert len(source) == 2 and source.dropped == 3
    said = caplog.text
    assert "1 of 5 rows are longer than 20 tokens and dropped" in said
    assert "1 of 4 pairs have an empty completion and are dropped" in said
    assert "1 of 4 pairs have two equal completions and are dropped" in said
    with pytest.raises(DataError, match="no pair has two different completions"):
        open_pairs(tmp_path, rows[1:3], characters())


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": "a", "chosen": "b"}, "column 'rejected': there is no such column"),
        ({"prompt": "a", "chosen": "b", "rejected": [model("c")]}, "must both be text or both be messages"),
        ({"chosen": "b", "rejected": "c"}, "there is no prompt: chosen and rejected begin differently"),
        ({"chosen": [model("b")], "rejected": [model("c")]}, "there is no prompt: the first turns differ"),
        (
            {"chosen": [user("a"), model("b"), user("c")], "rejected": [user("a"), model("b"), user("d")]},
            "turn 2 differs and is not the assistant's",
        ),
        (
            {"prompt": "other", "chosen": [user("a"), model("b")], "rejected": [user("a"), model("c")]},
            "column 'prompt': the conversations do not begin with it",
        ),
        ({"prompt": "a", "chosen": 1, "rejected": "c"}, "expected text or messages, found int"),
        ({"prompt": "", "chosen": "b", "rejected": "c"}, "column 'prompt': is empty"),
    ],
    ids=["column", "mixed", "no prefix", "no turn", "other questions", "other prompt", "type", "empty prompt"],
)
def test_what_is_no_pair_is_refused_with_its_place(tmp_path: Path, row: dict[str, Any], words: str) -> None:
    with pytest.raises(DataError, match=words):
        open_pairs(tmp_path, [row], characters(TURNS))


def test_a_template_that_rewrites_the_prompt_is_refused(tmp_path: Path) -> None:
    row = {
        "prompt": [user("a"), model("x@y"), user("b")],
        "chosen": [model("c"), user("d"), model("e")],
        "rejected": [model("f")],
    }
    prefix = "{% if messages|length > 3 %}!{% endif %}"
    with pytest.raises(DataError, match="writes the prompt differently when a completion follows"):
        open_pairs(tmp_path, [row], characters(prefix + FORGETFUL))


def test_a_pair_shares_its_prompt_in_the_forest(tmp_path: Path) -> None:
    rows = [{"prompt": "abc", "chosen": "d", "rejected": "ef"}, {"prompt": "g", "chosen": "hi", "rejected": "j"}]
    pairs = open_pairs(tmp_path, rows, characters()).take(0, 2)
    forest = forest_from_pairs(pairs)
    assert forest.length.tolist() == [3, 2, 3, 1, 3, 2] and forest.parent.tolist() == [-1, 0, 0, -1, 3, 3]
    assert forest.sequences.tolist() == [0, 0, 1, 1, 1, 2, 2, 2, 3, 3]
    learned = forest_from_pairs(pairs, learn_prompts=True)
    assert learned.sequences.tolist() == [0, 0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3]
    assert learned.fields["in_prompt"].tolist() == [1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]


def open_labelled(folder: Path, rows: list[dict[str, Any]], tokenizer: Any) -> LabelledSource:
    path = folder / "labelled.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    cfg = DatasetConfig(path=str(path), shuffle=False)
    return LabelledSource(load_rows(cfg), cfg, tokenizer, 0, LengthLimit(100))


def test_completions_with_a_label_are_read_as_text_and_as_turns(tmp_path: Path) -> None:
    tokenizer = characters(TURNS)
    rows = [
        {"prompt": "ab", "completion": "c", "label": True},
        {"prompt": [user("ab")], "completion": [model("c")], "label": 0},
    ]
    found = []
    for sample in open_labelled(tmp_path, rows, tokenizer).take(0, 2):
        words = ["".join(tokenizer.convert_ids_to_tokens(each.tolist())) for each in (sample.prompt, sample.completion)]
        found.append((*words, sample.desirable))
    assert found == [("ab", "c<eos>", True), ("<|user|>ab<eos>\n<|assistant|>", "c<eos>", False)]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": "a", "completion": "b", "label": "yes"}, "column 'label': expected true or false, found 'yes'"),
        ({"prompt": "a", "completion": "b"}, "column 'label': there is no such column"),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "Pairs .* have losses of their own"),
    ],
    ids=["text", "no label", "pairs"],
)
def test_what_has_no_label_is_refused(tmp_path: Path, row: dict[str, Any], words: str) -> None:
    with pytest.raises(DataError, match=words):
        open_labelled(tmp_path, [row], characters())


@pytest.mark.parametrize(("label", "expected"), [("true", True), ("False", False), (1.0, True), ("0", False)])
def test_labels_of_other_formats_are_read(tmp_path: Path, label: object, expected: bool) -> None:
    (sample,) = open_labelled(tmp_path, [{"prompt": "a", "completion": "b", "label": label}], characters()).take(0, 1)
    assert sample.desirable is expected


def test_overlong_pairs_can_be_cut(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As OpenRLHF cuts them: at the end, where the last token becomes the end-of-sequence token."""
    tokenizer = characters(TURNS)
    rows = [
        {"prompt": "ab", "chosen": "cdefg", "rejected": "d"},
        {"prompt": "ab", "chosen": "cdex", "rejected": "cdey"},  # equal where they are cut
        {"prompt": "abcdef", "chosen": "c", "rejected": "d"},  # no room for a completion
        {"prompt": "a", "chosen": "c", "rejected": "d"},
    ]
    with caplog.at_level(logging.WARNING):
        source = open_pairs(tmp_path, rows, tokenizer, limit=6, overlong="truncate")
    assert texts(source, tokenizer) == ("ab", "cde<eos>", "d<eos>")
    assert [pair.row for pair in source.take(0, 2)] == [0, 3] and source.truncated == 1
    assert "1 of 4 pairs are cut to 6 tokens" in caplog.text and "2 of 4 rows are longer than 6 tokens" in caplog.text


def test_only_pairs_are_cut(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "ab", "completion": "c"}) + "\n")
    cfg = DatasetConfig(path=str(path), overlong="truncate")
    with pytest.raises(DataError, match="overlong: truncate cuts pairs, and these are documents"):
        open_source("documents", load_rows(cfg), cfg, characters(TURNS), 0, LengthLimit(9), SourceOptions())


@pytest.mark.parametrize("value", [None, "much", "nan"])
def test_margins_are_read_where_the_loss_uses_them(tmp_path: Path, value: object) -> None:
    tokenizer = characters(TURNS)
    row = {"prompt": "ab", "chosen": "c", "rejected": "d"}
    path = tmp_path / "pairs.jsonl"
    cfg = DatasetConfig(path=str(path), shuffle=False)

    def margins(*rows: dict[str, object], used: bool = True) -> list[float]:
        path.write_text("".join(json.dumps(each) + "\n" for each in rows))
        source = PairSource(load_rows(cfg), cfg, tokenizer, 0, LengthLimit(9), used)
        return [pair.margin for pair in source.take(0, len(rows))]

    assert margins(row | {"margin": 0.5}, row | {"margin": 2}) == [0.5, 2.0]
    assert margins(row | {"margin": 0.5}, used=False) == [0.0]
    with pytest.raises(DataError, match=r"column 'margin'.*no such column"):
        margins(row)
    with pytest.raises(DataError, match=r"line 2.*expected a number"):
        margins(row | {"margin": 1.0}, row | {"margin": value})
