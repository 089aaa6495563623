"""Messages get the form that a template reads, also between the turns of a conversation."""

from typing import Any

import pytest
from transformers import AutoTokenizer
from vision_folders import vision_folder

from lockstep.config.data import DatasetConfig
from lockstep.data.images.content_forms import ContentForms
from lockstep.data.samples import Prompt
from lockstep.data.turn_tokenizer import TurnTokenizer

TEXTS = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
PARTS = (
    "{% for m in messages %}<{{ m['role'] }}>{% for part in m['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endfor %}"
)
BOTH = PARTS.replace("{% for part", "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for part").replace(
    "{% endfor %}{% endfor %}", "{% endfor %}{% endif %}{% endfor %}"
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return AutoTokenizer.from_pretrained(vision_folder(tmp_path_factory.mktemp("vision"), "idefics3"))


MESSAGES = [
    {"role": "system", "content": "brief"},
    {"role": "user", "content": [{"type": "text", "text": "see "}, {"type": "image"}]},
]


@pytest.mark.parametrize("template", [TEXTS, PARTS, BOTH])
def test_every_template_writes_the_same(tokenizer: Any, template: str) -> None:
    tokenizer.chat_template = template
    fitting = ContentForms(tokenizer, "<image>").fitting(MESSAGES)
    text = tokenizer.apply_chat_template(fitting, tokenize=False)
    assert text == "<system>brief<user>see <image>"
    assert (fitting == MESSAGES) == (template == BOTH), "what is read is left as it is"


def test_a_template_that_reads_neither_gets_what_there_is(tokenizer: Any) -> None:
    tokenizer.chat_template = "{{ raise_exception('no') }}"
    assert ContentForms(tokenizer, "<image>").fitting(MESSAGES) == MESSAGES


@pytest.mark.parametrize("template", [TEXTS, PARTS, BOTH])
def test_an_environments_answer_between_two_turns(tokenizer: Any, template: str) -> None:
    tokenizer.chat_template = template
    turns = TurnTokenizer(tokenizer, DatasetConfig(path="x"))
    prompt = Prompt("0:0", 0, tokenizer("ab", return_tensors="np")["input_ids"][0], "", MESSAGES)
    reply = turns.reply(prompt, [{"role": "user", "content": "wrong"}], tokenizer.convert_tokens_to_ids("a")).tokens
    assert tokenizer.decode(reply).replace(" ", "") == "<user>wrong"
