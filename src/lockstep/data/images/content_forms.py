"""Messages in the form that a chat template reads: some read texts, some lists of parts, some both."""

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from lockstep.data.template_limits import TemplateLimitReached, render_chat

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer

_Message = dict[str, Any]
_PROBE = "zzwrittenzz"
"""A text that no template contains."""


class ContentForms:
    """Adapts the contents of messages to the tokenizer's chat template.

    Args:
        placeholder: what stands for an image in a text, for templates that read no parts; empty if there are no images.
    """

    def __init__(self, tokenizer: "Tokenizer", placeholder: str = "") -> None:
        self._tokenizer, self._placeholder = tokenizer, placeholder
        self._reads = lru_cache(maxsize=8)(self._find_forms)

    def fitting(self, messages: Sequence[_Message]) -> list[_Message]:
        """Returns the messages with contents that the template reads: parts become a text, or a text becomes one part,
        if it reads only the other."""
        texts, parts = self._reads(str(self._tokenizer.chat_template))
        if not texts and not parts:
            return list(messages)
        return [self._fitted(message, texts, parts) for message in messages]

    def _fitted(self, message: _Message, texts: bool, parts: bool) -> _Message:
        content = message.get("content")
        if isinstance(content, str) and not texts:
            return {**message, "content": [{"type": "text", "text": content}]}
        if isinstance(content, list) and not parts:
            return {**message, "content": "".join(self._text_of(part) for part in content)}
        return message

    def _text_of(self, part: Any) -> str:
        if isinstance(part, dict):
            return self._placeholder if part.get("type") == "image" else str(part.get("text", ""))
        return str(part)

    def _find_forms(self, template: str) -> tuple[bool, bool]:
        """Whether the template reads texts, and whether it reads parts."""
        text = self._written(_PROBE)
        image = [{"type": "image"}] if self._placeholder else []
        parts = self._written([*image, {"type": "text", "text": _PROBE}])
        return _PROBE in text, _PROBE in parts and self._placeholder in parts and "'type'" not in parts

    def _written(self, content: Any) -> str:
        from jinja2 import TemplateError

        try:
            return render_chat(self._tokenizer, [{"role": "user", "content": content}], add_generation_prompt=True)
        except (TemplateError, TemplateLimitReached, TypeError, ValueError):
            return ""
