"""The tokens between two turns of a conversation: sampled tokens are never tokenized again, so the tokens of the
environment's answer, and what the template writes around it, are appended to them."""

import json
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from lockstep.config.data import DatasetConfig
from lockstep.data.dataset_format import Message
from lockstep.data.images.content_forms import ContentForms
from lockstep.data.samples import Prompt
from lockstep.data.template_limits import TemplateLimitReached, render_chat

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer

_USER_MARKER, _ASSISTANT_MARKER = "zzaskedzz", "zzsaidzz"
"""Texts that no template contains."""


class TurnError(ValueError):
    """The chat template cannot continue a conversation."""

    def __init__(self, problem: str) -> None:
        super().__init__(f"{problem}; set model.chat_template to a template that supports this")
        self.problem = problem


class TurnTokenizer:
    """Makes the tokens between the turns of conversations.

    Args:
        tools: schemas of the functions that a model may call, as for `TemplateRenderer`.
    """

    def __init__(self, tokenizer: "Tokenizer", cfg: DatasetConfig, tools: Sequence[dict[str, Any]] = ()) -> None:
        self.tokenizer, self._cfg, self._tools = tokenizer, cfg, list(tools) or None
        self._forms = ContentForms(tokenizer)
        self._bare_opening = lru_cache(maxsize=16)(self._opening)

    def is_chat(self, prompt: Prompt) -> bool:
        """Returns whether the chat template was applied to the prompt."""
        return prompt.messages is not None or bool(self._cfg.chat)

    def opening(self, prompt: Prompt, messages: Sequence[Message] = ()) -> np.ndarray:
        """Returns the tokens (int32) between a prompt that was rendered without an open turn and the model's first
        turn, including the environment's first messages.

        Raises:
            TurnError: the template cannot render these messages there.
        """
        if not self.is_chat(prompt):
            return self._encode(_joined_contents(messages))
        if prompt.messages is not None and prompt.messages[-1]["role"] == "assistant":
            if messages:
                raise TurnError("the prompt ends within the assistant's turn, where an environment cannot add messages")
            return self._encode("")
        arguments = _template_arguments_key(prompt)
        return self._opening(arguments, messages) if messages else self._bare_opening(arguments)

    def _opening(self, arguments: str, messages: Sequence[Message] = ()) -> np.ndarray:
        question = [{"role": "user", "content": _USER_MARKER}]
        before = self._render(question, arguments, open_turn=False)
        after = self._render([*question, *messages], arguments, open_turn=True)
        if not after.startswith(before):
            raise TurnError("the chat template writes a user's turn differently when another turn follows")
        return self._encode(after[len(before) :])

    def reply(self, prompt: Prompt, messages: Sequence[Message], last: int) -> np.ndarray:
        """Returns the tokens (int32) between a turn of the model, whose last token is `last`, and its next turn,
        including the environment's answer.

        Raises:
            TurnError: the template cannot render these messages there.
        """
        if not self.is_chat(prompt):
            return self._encode(_joined_contents(messages))
        arguments = _template_arguments_key(prompt)
        exchange = [{"role": "user", "content": _USER_MARKER}, {"role": "assistant", "content": _ASSISTANT_MARKER}]
        text = self._render([*exchange, *messages], arguments, open_turn=True)
        _, found, tail = text.partition(_ASSISTANT_MARKER)
        if not found:
            raise TurnError("the chat template does not write the assistant's message")
        written = str(self.tokenizer.convert_ids_to_tokens(int(last)))
        if tail.startswith(written):
            tail = tail[len(written) :]  # the model ended its turn itself
        return self._encode(tail)

    def check(self, prompt: Prompt, role: str) -> None:
        """Raises TurnError if the template cannot render an answer of this role between two turns."""
        if self.is_chat(prompt):
            self.opening(prompt)
            self.reply(prompt, [{"role": role, "name": "probe", "content": "answer"}], self.tokenizer.eos_token_id or 0)

    def _render(self, messages: Sequence[Message], arguments: str, *, open_turn: bool) -> str:
        from jinja2 import TemplateError

        try:
            return render_chat(
                self.tokenizer,
                self._forms.fitting(messages),
                tools=self._tools,
                add_generation_prompt=open_turn,
                **json.loads(arguments),
            )
        except TemplateLimitReached as error:
            raise TurnError(f"the chat template {error.problem}") from error
        except (TemplateError, TypeError, ValueError) as error:
            raise TurnError(f"the chat template refuses {[each['role'] for each in messages]}: {error}") from error

    def _encode(self, text: str) -> np.ndarray:
        tokens = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] if text else []
        return np.asarray(tokens, np.int32)


def _template_arguments_key(prompt: Prompt) -> str:
    """Returns the template arguments of a row as JSON, because a dict cannot be a cache key."""
    found = prompt.columns.get("chat_template_kwargs")
    given = {name: value for name, value in found.items() if value is not None} if isinstance(found, dict) else {}
    return json.dumps(given, sort_keys=True)


def _joined_contents(messages: Sequence[Message]) -> str:
    return "".join(str(message["content"]) for message in messages)
