"""What stands between two turns of the model, in tokens.

What was sampled is never tokenized again: the tokens of an answer are appended to those that the model wrote. They are
what the chat template writes between an assistant's turn and the next one, found by rendering a conversation of known
words with and without the answer.
"""

import json
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from lockstep.config.data import Dataset
from lockstep.data.formats import Message
from lockstep.data.samples import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer

_ASKED, _SAID = "zzaskedzz", "zzsaidzz"
"""Words that no template writes by itself."""


class TurnError(ValueError):
    """A chat template that cannot continue a conversation."""

    def __init__(self, problem: str) -> None:
        super().__init__(f"{problem}; set model.chat_template to one that can")
        self.problem = problem


class Turns:
    """Tokens between the turns of conversations.

    Args:
        tools: as in the prompts' rendering.
    """

    def __init__(self, tokenizer: "Tokenizer", cfg: Dataset, tools: Sequence[dict[str, Any]] = ()) -> None:
        self.tokenizer, self._cfg, self._tools = tokenizer, cfg, list(tools) or None
        self._bare_opening = lru_cache(maxsize=16)(self._opening)

    def is_chat(self, prompt: Prompt) -> bool:
        """Whether the prompt went through the chat template."""
        return prompt.messages is not None or bool(self._cfg.chat)

    def opening(self, prompt: Prompt, messages: Sequence[Message] = ()) -> np.ndarray:
        """int32 `[tokens]`: from a prompt that was rendered without an open turn to where the model begins to write,
        with what the environment says first in between.

        Raises:
            TurnError: the template does not take these messages there.
        """
        if not self.is_chat(prompt):
            return self._encode(_plain(messages))
        if prompt.messages is not None and prompt.messages[-1]["role"] == "assistant":
            if messages:
                raise TurnError("the prompt ends within the assistant's turn, where an environment cannot speak")
            return self._encode("")
        arguments = _arguments(prompt)
        return self._opening(arguments, messages) if messages else self._bare_opening(arguments)

    def _opening(self, arguments: str, messages: Sequence[Message] = ()) -> np.ndarray:
        asked = [{"role": "user", "content": _ASKED}]
        before = self._render(asked, arguments, open_turn=False)
        after = self._render([*asked, *messages], arguments, open_turn=True)
        if not after.startswith(before):
            raise TurnError("the chat template writes a user's turn differently when another one follows")
        return self._encode(after[len(before) :])

    def reply(self, prompt: Prompt, messages: Sequence[Message], last: int) -> np.ndarray:
        """int32 `[tokens]`: from the end of a turn of the model, whose last token is `last`, over the answer to where
        the model begins to write again.

        Raises:
            TurnError: the template does not take these messages there.
        """
        if not self.is_chat(prompt):
            return self._encode(_plain(messages))
        arguments = _arguments(prompt)
        said = [{"role": "user", "content": _ASKED}, {"role": "assistant", "content": _SAID}]
        text = self._render([*said, *messages], arguments, open_turn=True)
        _, found, tail = text.partition(_SAID)
        if not found:
            raise TurnError("the chat template does not write what the assistant said")
        written = str(self.tokenizer.convert_ids_to_tokens(int(last)))
        if tail.startswith(written):
            tail = tail[len(written) :]  # the model has ended its turn itself
        return self._encode(tail)

    def check(self, prompt: Prompt, role: str) -> None:
        """Whether an answer of this role can stand between two turns. Raises TurnError."""
        if self.is_chat(prompt):
            self.opening(prompt)
            self.reply(prompt, [{"role": role, "name": "probe", "content": "answer"}], self.tokenizer.eos_token_id or 0)

    def _render(self, messages: Sequence[Message], arguments: str, *, open_turn: bool) -> str:
        from jinja2 import TemplateError

        try:
            return str(
                self.tokenizer.apply_chat_template(
                    list(messages),
                    tools=self._tools,
                    tokenize=False,
                    add_generation_prompt=open_turn,
                    **json.loads(arguments),
                )
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise TurnError(f"the chat template refuses {[each['role'] for each in messages]}: {error}") from error

    def _encode(self, text: str) -> np.ndarray:
        tokens = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] if text else []
        return np.asarray(tokens, np.int32)


def _arguments(prompt: Prompt) -> str:
    """What a row adds to the template's arguments, as JSON, which can be a key."""
    found = prompt.columns.get("chat_template_kwargs")
    given = {name: value for name, value in found.items() if value is not None} if isinstance(found, dict) else {}
    return json.dumps(given, sort_keys=True)


def _plain(messages: Sequence[Message]) -> str:
    return "".join(str(message["content"]) for message in messages)
