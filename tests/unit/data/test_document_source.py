"""Documents: their tokens, and which of them are learned."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from tiny_tokenizers import BLOCKS, FORGETFUL, TURNS, byte_pairs, characters

from lockstep.config.data import DatasetConfig
from lockstep.data.chat_templates import TokenizerError
from lockstep.data.dataset_rows import DataError
from lockstep.data.datasets import load_rows
from lockstep.data.row_lengths import LengthLimit
from lockstep.data.sample_sources import DocumentSource
from lockstep.data.samples import Document

ROOT = Path(__file__).parents[3]
TALK = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": "ab"},
    {"role": "assistant", "content": "cd"},
    {"role": "user", "content": "e"},
    {"role": "assistant", "content": "f"},
]


@pytest.fixture
def source(tmp_path):
    def make(rows: list[dict], tokenizer: Any, limit: int = 200, whole: bool = False, **options: Any) -> DocumentSource:
        path = tmp_path / "data.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        cfg = DatasetConfig(path=str(path), **options)
        return DocumentSource(load_rows(cfg), cfg, tokenizer, 0, LengthLimit(limit), whole)

    return make


def read(tokenizer: Any, document: Document) -> tuple[str, str]:
    """Returns (all text, learned text with | between separate parts)."""
    words = tokenizer.convert_ids_to_tokens(document.tokens.tolist())
    learned = ""
    for word, wanted, before in zip(words, document.loss_mask, [False, *document.loss_mask[:-1]], strict=True):
        learned += ("|" if wanted and not before and learned else "") + (word if wanted else "")
    return "".join(words), learned


def made(source, row: dict, tokenizer: Any, **options: Any) -> tuple[str, str]:
    document = source([row], tokenizer, **options).sample(0)
    assert document.tokens.dtype == np.int32 and document.loss_mask.dtype == np.bool_
    assert not document.loss_mask[0]
    return read(tokenizer, document)


def test_answer_is_learned_with_its_end(source) -> None:
    assert made(source, {"prompt": "1+1=", "answer": "2"}, characters()) == ("1+1=2<eos>", "2<eos>")
    assert made(source, {"prompt": "1+1=", "answer": 2}, characters()) == ("1+1=2<eos>", "2<eos>")
    assert made(source, {"prompt": "a", "completion": " b"}, characters(bos=True)) == ("<s>a b<eos>", " b<eos>")
    templated = made(source, {"prompt": "1", "answer": "2"}, characters(), template="Q{prompt}A")
    assert templated == ("Q1A2<eos>", "2<eos>")


def test_text_is_learned_except_its_first_token(source) -> None:
    assert made(source, {"text": "abc"}, characters()) == ("abc<eos>", "bc<eos>")
    assert made(source, {"text": "abc"}, characters(bos=True)) == ("<s>abc<eos>", "abc<eos>")


def test_train_on_prompt_learns_everything(source) -> None:
    assert made(source, {"prompt": "ab", "answer": "c"}, characters(), whole=True)[1] == "bc<eos>"
    whole = made(source, {"messages": TALK}, characters(TURNS), whole=True)
    assert "<|system|>" + whole[1] == whole[0]


def test_merge_across_the_end_of_the_prompt_is_undone(source) -> None:
    """The prompt has the same tokens as in generation, so that the learned tokens are those that would be sampled."""
    tokenizer = characters(merges=("=2",))
    document = source([{"prompt": "1+1=", "answer": "2"}], tokenizer).sample(0)
    assert tokenizer.convert_ids_to_tokens(document.tokens.tolist()) == ["1", "+", "1", "=", "2", "<eos>"]
    assert document.loss_mask.tolist() == [False] * 4 + [True] * 2


@pytest.mark.parametrize("template", [TURNS, BLOCKS])
def test_assistant_turns_are_learned_up_to_their_end(source, template) -> None:
    tokenizer = characters(template)
    whole, learned = made(source, {"messages": TALK}, tokenizer)
    assert whole == tokenizer.apply_chat_template(TALK, tokenize=False)
    assert learned == "cd<eos>|f<eos>"


def test_mask_of_generation_blocks_is_that_of_transformers(source) -> None:
    tokenizer = characters(BLOCKS)
    expected = tokenizer.apply_chat_template(TALK, return_dict=True, return_assistant_tokens_mask=True)
    document = source([{"messages": TALK}], tokenizer).sample(0)
    assert document.tokens.tolist() == expected["input_ids"]
    assert document.loss_mask.tolist() == [bool(wanted) for wanted in expected["assistant_masks"]]


@pytest.mark.parametrize("template", [TURNS, BLOCKS])
def test_with_a_completion_in_turns_the_prompts_turns_are_not_learned(source, template) -> None:
    row = {"prompt": TALK[:4], "completion": TALK[4:]}
    assert made(source, row, characters(template))[1] == "f<eos>"
    with_answer = {"prompt": TALK[:4], "answer": "f"}
    assert made(source, with_answer, characters(template))[1] == "f<eos>"
    assert made(source, {"prompt": "ab", "answer": "c"}, characters(template), chat=True)[1] == "c<eos>"


@pytest.mark.parametrize("template", [TURNS, BLOCKS])
def test_conversation_without_a_final_answer_learns_assistant_turns(source, template) -> None:
    assert made(source, {"messages": TALK[:4]}, characters(template))[1] == "cd<eos>"


def test_template_that_rewrites_earlier_turns_is_refused(source) -> None:
    thinking = [{**turn, "content": "t@" + turn["content"]} for turn in TALK]
    with pytest.raises(DataError, match=r"line 1: .*renders message 2 differently.*generation %} blocks"):
        source([{"messages": thinking}], characters(FORGETFUL))
    assert made(source, {"messages": thinking[:3]}, characters(FORGETFUL))[1] == "t@cd<eos>"


def test_verl_rows_learn_the_ground_truth(source) -> None:
    row = {"data_source": "d", "prompt": TALK[1:2], "reward_model": {"ground_truth": "7"}}
    assert made(source, row, characters(TURNS))[1] == "7<eos>"


def test_take_goes_through_epochs(source) -> None:
    documents = source([{"text": f"t{i}"} for i in range(5)], characters())
    uids = [document.uid for document in documents.take(0, 10)]
    assert sorted(uids) == sorted(f"{epoch}:{row}" for epoch in range(2) for row in range(5))
    assert [document.uid for document in documents.take(3, 4)] == uids[3:7]
    assert documents.usable_by_uid(uids[8]).uid == uids[8]


@pytest.mark.parametrize("merges", [(), ("=2",)])
def test_length_counts_the_end_of_sequence_and_undone_merges(source, merges) -> None:
    rows = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "1", "answer": "2"}]
    assert source(rows, characters(merges=merges), limit=6).dropped == 0
    dropping = source(rows, characters(merges=merges), limit=5, overlong="drop")
    assert (len(dropping), dropping.dropped) == (1, 1)
    assert {document.row for document in dropping.take(0, 4)} == {1}
    with pytest.raises(DataError, match="the document has 6 tokens, more than the 5 that fit"):
        source(rows, characters(merges=merges), limit=5)


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "a"},
        {"prompt": "a", "answer": None},
        {"prompt": "a", "answer": ["x"]},
        {"messages": TALK[:2]},
        {"prompt": "a", "answer": ""},
    ],
)
def test_rows_without_anything_to_learn_are_refused(source, row) -> None:
    with pytest.raises(DataError, match="line 1: there is nothing to learn"):
        source([row], characters(TURNS))


def test_tokenizer_without_an_end_is_refused_for_text_only(source) -> None:
    with pytest.raises(TokenizerError, match="has no end-of-sequence token"):
        source([{"prompt": "a", "answer": "b"}], characters(eos=False))
    assert made(source, {"messages": TALK}, characters(BLOCKS, eos=False))[1] == "cd<eos>|f<eos>"


def test_text_has_no_turns(source) -> None:
    with pytest.raises(ValueError, match=r"data.chat is true"):
        source([{"text": "a"}], characters(TURNS), chat=True)


@pytest.mark.parametrize("template", [TURNS, BLOCKS])
def test_masks_hold_for_byte_level_tokens(source, template) -> None:
    tokenizer = byte_pairs(template)
    said = ["the sum 😀 of ä", "\n\nthe answer is 七 \n"]
    talk = [
        turn for text in said for turn in ({"role": "user", "content": text}, {"role": "assistant", "content": text})
    ]
    document = source([{"messages": talk}], tokenizer).sample(0)
    assert tokenizer.decode(document.tokens) == tokenizer.apply_chat_template(talk, tokenize=False)
    assert tokenizer.decode(document.tokens[document.loss_mask]) == "".join(text + "<eos>" for text in said)
    if template == BLOCKS:
        expected = tokenizer.apply_chat_template(talk, return_dict=True, return_assistant_tokens_mask=True)
        assert document.loss_mask.tolist() == [bool(wanted) for wanted in expected["assistant_masks"]]


@pytest.mark.parametrize("column", ["conversations", "messages"])
def test_sharegpts_conversations_are_read_as_messages(source, column: str) -> None:
    human, gpt = {"from": "human", "value": "ab"}, {"from": "gpt", "value": "cd"}
    system = {"from": "system", "value": "s", "weight": None}
    expected = made(source, {"messages": [{"role": "system", "content": "s"}, *TALK[1:3]]}, characters(TURNS))
    assert made(source, {column: [system, human, gpt]}, characters(TURNS)) == expected
    roles = [{"role": "human", "content": "ab"}, {"role": "gpt", "content": "cd"}]
    assert made(source, {column: roles}, characters(TURNS)) == made(source, {"messages": TALK[1:3]}, characters(TURNS))


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_the_example_prints_the_learned_tokens_as_the_docs_show_them(tmp_path) -> None:
    """Neither the header of the assistant's turn nor the newline after its end is learned."""
    tokenizer = characters(CHATML, merges=("user", "assistant"))
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.eos_token = "<|im_end|>"
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "talk.jsonl").write_text(json.dumps({"messages": TALK[1:3]}) + "\n")
    config = {"recipe": "sft", "name": "x", "steps": 1, "model": {"path": str(tmp_path / "tokenizer")}}
    file = tmp_path / "sft.yaml"
    file.write_text(yaml.safe_dump(config | {"data": {"path": str(tmp_path / "talk.jsonl")}}))
    command = [sys.executable, ROOT / "examples" / "learned_tokens.py", file]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() in (ROOT / "docs" / "data.md").read_text()
