"""The tokens between two turns, compared with the rendering of whole conversations."""

import numpy as np
import pytest

from lockstep.config.data import DatasetConfig
from lockstep.data.samples import Prompt
from lockstep.data.turn_tokenizer import TurnError, TurnTokenizer
from lockstep.models.tiny_model import TinyModel, char_tokenizer

QWEN = (
    "{%- if tools %}{{ '<|im_start|>system\\n' + tools | tojson + '<|im_end|>\\n' }}{%- endif %}"
    "{%- for message in messages %}"
    "{%- if message.role == 'tool' %}"
    "{%- if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{%- endif %}"
    "{{ '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{%- endif %}"
    "{%- else %}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{%- endif %}"
    "{%- endfor %}{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}"
)
"""A template like Qwen2.5's."""
LLAMA = (
    "{% for message in messages %}<|start|>{{ message.role }}<|end|>\n\n{{ message.content }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant<|end|>\n\n{% endif %}"
)
"""A template like Llama 3's: a turn ends with the end-of-sequence token, and nothing follows it."""
MISTRAL = (
    "{% for message in messages %}{% if message.role == 'user' %}[INST] {{ message.content }} [/INST]"
    "{% elif message.role == 'assistant' %}{{ message.content }}<eos>"
    "{% else %}{{ raise_exception('only user and assistant') }}{% endif %}{% endfor %}"
)
TOOL = [{"role": "tool", "name": "f", "content": "42"}, {"role": "tool", "name": "f", "content": "43"}]
USER = [{"role": "user", "content": "go on"}]


def turns(template: str, **data) -> TurnTokenizer:
    tokenizer = char_tokenizer(TinyModel(chat=True))
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = template
    return TurnTokenizer(tokenizer, DatasetConfig(path="x", **data))


def prompt(made: TurnTokenizer, chat: bool = True) -> Prompt:
    messages = [{"role": "user", "content": "what is it?"}]
    text = made.tokenizer.apply_chat_template(messages, tokenize=False) if chat else "what is it?"
    tokens = np.asarray(made.tokenizer(text, add_special_tokens=False)["input_ids"], np.int32)
    return Prompt("0:0", 0, tokens, text, messages if chat else None)


@pytest.mark.parametrize("template, messages", [(QWEN, TOOL), (QWEN, USER), (LLAMA, TOOL), (MISTRAL, USER)])
def test_tokens_of_many_turns_equal_the_rendered_conversation(template, messages) -> None:
    made = turns(template)
    start = prompt(made)
    eos = "<|im_end|>" if template is QWEN else "<eos>"
    said = made.tokenizer(f"let me see{eos}", add_special_tokens=False)["input_ids"]
    tokens = [*start.tokens, *made.opening(start).tokens, *said, *made.reply(start, messages, said[-1]).tokens]
    tokens += [*said, *made.reply(start, messages, said[-1]).tokens]
    turn = {"role": "assistant", "content": "let me see"}
    whole = [*start.messages, turn, *messages, turn, *messages]
    expected = made.tokenizer.apply_chat_template(whole, tokenize=False, add_generation_prompt=True)
    assert made.tokenizer.decode(tokens) == expected
    assert tokens == made.tokenizer(expected, add_special_tokens=False)["input_ids"]


def test_a_turn_that_a_stop_string_ended_is_closed_by_the_template() -> None:
    made = turns(QWEN)
    start = prompt(made)
    last = made.tokenizer("]", add_special_tokens=False)["input_ids"][-1]
    text = made.tokenizer.decode(made.reply(start, USER, last).tokens)
    assert text == "<|im_end|>\n<|im_start|>user\ngo on<|im_end|>\n<|im_start|>assistant\n"


def test_an_environment_may_send_the_first_message() -> None:
    made = turns(QWEN)
    start = prompt(made)
    assert made.tokenizer.decode(made.opening(start).tokens) == "<|im_start|>assistant\n"
    spoken = made.tokenizer.decode(made.opening(start, USER).tokens)
    assert spoken == "<|im_start|>user\ngo on<|im_end|>\n<|im_start|>assistant\n"


def test_plain_text_is_appended_unchanged() -> None:
    made = turns(QWEN)
    start = prompt(made, chat=False)
    assert made.tokenizer.decode(made.reply(start, TOOL, 5).tokens) == "4243"
    assert made.opening(start).tokens.size == 0
    assert made.tokenizer.decode(made.opening(start, USER).tokens) == "go on"


def test_a_template_without_tools_is_refused() -> None:
    made = turns(MISTRAL)
    with pytest.raises(TurnError, match=r"refuses \['user', 'assistant', 'tool'\].*model.chat_template"):
        made.check(prompt(made), "tool")
    made.check(prompt(made), "user")


def test_the_rows_arguments_reach_the_template() -> None:
    made = turns(
        "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}{{ word }}{% endif %}"
    )
    start = prompt(made)
    start.columns = {"chat_template_kwargs": {"word": "think", "other": None}}
    assert made.tokenizer.decode(made.opening(start).tokens) == "think"
