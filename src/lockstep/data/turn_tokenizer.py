"""The tokens between two turns of a conversation: sampled tokens are never tokenized again, so the tokens of the
environment's answer, and what the template writes around it, are appended to them."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from lockstep.config.data import DatasetConfig
from lockstep.data.dataset_format import Message
from lockstep.data.images.content_forms import ContentForms
from lockstep.data.images.image_errors import AdjacentImages, PlaceholderMismatch
from lockstep.data.images.image_loader import LoadedImage
from lockstep.data.images.observation_images import ObservationImages, UnusableObservation, is_image_part
from lockstep.data.samples import PlacedImage, Prompt
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


@dataclass(slots=True)
class TurnTokens:
    """The tokens between two turns of the model."""

    tokens: np.ndarray
    """int32 `[tokens]`."""
    images: list[PlacedImage] = field(default_factory=list)
    """The images of an environment's answer, with places in `tokens`."""


class TurnTokenizer:
    """Makes the tokens between the turns of conversations.

    Args:
        tools: schemas of the functions that a model may call, as for `TemplateRenderer`.
        images: loads the images of environments' answers; None if they have none.
    """

    def __init__(
        self,
        tokenizer: "Tokenizer",
        cfg: DatasetConfig,
        tools: Sequence[dict[str, Any]] = (),
        images: ObservationImages | None = None,
    ) -> None:
        self.tokenizer, self.images, self._cfg, self._tools = tokenizer, images, cfg, list(tools) or None
        self._placeholder = "" if images is None else images.processor.placeholder
        self._forms = ContentForms(tokenizer, self._placeholder)
        self._bare_opening = lru_cache(maxsize=16)(self._opening_text)

    def is_chat(self, prompt: Prompt) -> bool:
        """Returns whether the chat template was applied to the prompt."""
        return prompt.messages is not None or bool(self._cfg.chat)

    def opening(
        self, prompt: Prompt, messages: Sequence[Message] = (), images: Sequence[LoadedImage] = ()
    ) -> TurnTokens:
        """Returns the tokens between a prompt that was rendered without an open turn and the model's first turn,
        including the environment's first messages.

        Args:
            images: of the parts `{"type": "image"}` of the messages.

        Raises:
            TurnError: the template cannot render these messages there.
            UnusableObservation: the images cannot be shown there.
        """
        if not self.is_chat(prompt):
            return self._encode(self._joined_contents(messages), images)
        if prompt.messages is not None and prompt.messages[-1]["role"] == "assistant":
            if messages:
                raise TurnError("the prompt ends within the assistant's turn, where an environment cannot add messages")
            return self._encode("")
        arguments = _template_arguments_key(prompt)
        text = self._opening_text(arguments, messages) if messages else self._bare_opening(arguments)
        return self._encode(text, images)

    def _opening_text(self, arguments: str, messages: Sequence[Message] = ()) -> str:
        question = [{"role": "user", "content": _USER_MARKER}]
        before = self._render(question, arguments, open_turn=False)
        after = self._render([*question, *messages], arguments, open_turn=True)
        if not after.startswith(before):
            raise TurnError("the chat template writes a user's turn differently when another turn follows")
        return after[len(before) :]

    def reply(
        self, prompt: Prompt, messages: Sequence[Message], last: int, images: Sequence[LoadedImage] = ()
    ) -> TurnTokens:
        """Returns the tokens between a turn of the model, whose last token is `last`, and its next turn, including the
        environment's answer. Arguments and errors as in `opening`."""
        if not self.is_chat(prompt):
            return self._encode(self._joined_contents(messages), images)
        arguments = _template_arguments_key(prompt)
        exchange = [{"role": "user", "content": _USER_MARKER}, {"role": "assistant", "content": _ASSISTANT_MARKER}]
        text = self._render([*exchange, *messages], arguments, open_turn=True)
        _, found, tail = text.partition(_ASSISTANT_MARKER)
        if not found:
            raise TurnError("the chat template does not write the assistant's message")
        written = str(self.tokenizer.convert_ids_to_tokens(int(last)))
        if tail.startswith(written):
            tail = tail[len(written) :]  # the model ended its turn itself
        return self._encode(tail, images)

    def check(self, prompt: Prompt, role: str) -> None:
        """Raises TurnError if the template cannot render an answer of this role between two turns."""
        if self.is_chat(prompt):
            self.opening(prompt)
            self.reply(prompt, [{"role": role, "name": "probe", "content": "answer"}], self.tokenizer.eos_token_id or 0)
            if self.images is not None:
                self._check_images(prompt, role)

    def _check_images(self, prompt: Prompt, role: str) -> None:
        """Raises TurnError if the template does not write an image of an answer of this role."""
        parts = [{"type": "image"}, {"type": "text", "text": _USER_MARKER}]
        exchange = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        text = self._render(
            [*exchange, {"role": role, "name": "probe", "content": parts}],
            _template_arguments_key(prompt),
            open_turn=True,
        )
        if text.count(self._placeholder) != 1 or _USER_MARKER not in text:
            raise TurnError(f"the chat template does not write the images of a message of the role {role!r}")

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

    def _encode(self, text: str, images: Sequence[LoadedImage] = ()) -> TurnTokens:
        if images:
            return self._encode_images(text, images)
        tokens = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] if text else []
        return TurnTokens(np.asarray(tokens, np.int32))

    def _encode_images(self, text: str, images: Sequence[LoadedImage]) -> TurnTokens:
        """Expands the placeholders of images, and tokenizes the text. Raises UnusableObservation."""
        assert self.images is not None
        processor = self.images.processor
        try:
            expanded = processor.expand_text(text, [image.size for image in images])
        except PlaceholderMismatch as error:
            raise UnusableObservation(f"{error}: no text may contain the placeholder") from error
        except AdjacentImages as error:
            raise UnusableObservation(f"{error}: write some between them") from error
        tokens, places = processor.encode(expanded, special_tokens=False)
        for number, (image, where) in enumerate(zip(images, places, strict=True)):
            if len(where) != image.expansion.features:
                raise UnusableObservation(
                    f"image {number} has {len(where)} places among its tokens and {image.expansion.features} features"
                )
            if where[-1] + 1 == (places[number + 1][0] if number + 1 < len(places) else tokens.size):
                raise UnusableObservation(f"image {number} has no text after it: write some")
        return TurnTokens(
            tokens,
            [
                PlacedImage(image.digest, where, image.source, image.size, image.expansion.resized)
                for image, where in zip(images, places, strict=True)
            ],
        )

    def _joined_contents(self, messages: Sequence[Message]) -> str:
        """The text of messages without a chat template."""
        return "".join(self._plain(message["content"]) for message in messages)

    def _plain(self, content: Any) -> str:
        if not isinstance(content, list):
            return str(content)
        return "".join(
            self._placeholder if is_image_part(part) else str(part.get("text", "") if isinstance(part, dict) else part)
            for part in content
        )


def _template_arguments_key(prompt: Prompt) -> str:
    """Returns the template arguments of a row as JSON, because a dict cannot be a cache key."""
    found = prompt.columns.get("chat_template_kwargs")
    given = {name: value for name, value in found.items() if value is not None} if isinstance(found, dict) else {}
    return json.dumps(given, sort_keys=True)
