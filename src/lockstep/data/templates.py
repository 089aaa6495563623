"""From samples to tokens: chat templates, plain text, and which tokens are learned.

The mask of a conversation comes from the template's own `{% generation %}` blocks, or else from rendering it
turn by turn, which is refused where a template rewrites earlier turns.
"""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from lockstep.config.data import Dataset
from lockstep.data.datasets import BadRow
from lockstep.data.formats import Content, Message, Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer

Span = tuple[int, int]
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


class TokenizerError(ValueError):
    """The tokenizer lacks what the data needs."""

    def __init__(self, tokenizer: "Tokenizer", missing: str, remedy: str) -> None:
        self.tokenizer, self.missing, self.remedy = str(tokenizer.name_or_path), missing, remedy
        super().__init__(f"the tokenizer {self.tokenizer!r} has no {missing}. {remedy}")


class Renderer:
    """Renders samples of one data set for one tokenizer.

    Args:
        tools: schemas of the functions that a model may call, for samples that bring none of their own.
        open_turn: whether a prompt ends where the model begins to write; otherwise before that, since an environment
            may have something to say first (`Turns.opening`).

    Raises:
        TokenizerError: no chat template where conversations are rendered.
        ValueError: a `data.template` that cannot be used.
    """

    def __init__(
        self,
        tokenizer: "Tokenizer",
        cfg: Dataset,
        tools: Sequence[dict[str, Any]] = (),
        open_turn: bool = True,
    ) -> None:
        self.tokenizer = tokenizer
        self._cfg, self._tools, self._open_turn = cfg, list(tools) or None, open_turn
        if cfg.template is not None:
            _check_template(cfg.template)
        if cfg.chat:
            self._need_chat_template()

    def _need_chat_template(self) -> None:
        if not self.tokenizer.chat_template:
            remedy = "Set model.chat_template to a Jinja file, or use data without messages (data.chat: false)."
            raise TokenizerError(self.tokenizer, "chat template", remedy)

    def need_eos(self) -> None:
        if self.tokenizer.eos_token_id is None:
            remedy = "Without it no answer can learn to end: set eos_token in tokenizer_config.json."
            raise TokenizerError(self.tokenizer, "end-of-sequence token", remedy)

    def is_chat(self, content: Content) -> bool:
        """Whether this goes through the chat template."""
        if isinstance(content, str):
            return bool(self._cfg.chat)
        if self._cfg.chat is False:
            raise BadRow(None, "the prompt is a conversation, but data.chat is false", "Remove data.chat.")
        if self._cfg.template is not None:
            raise BadRow(None, "the prompt is a conversation, but data.template is for text", "Remove data.template.")
        self._need_chat_template()
        return True

    def prompt(self, sample: Sample) -> str:
        """The prompt as the model sees it, up to where it begins to write."""
        if self.is_chat(sample.prompt):
            messages = self.conversation(sample.prompt)
            return self._render(messages, sample, open_turn=self._open_turn or messages[-1]["role"] == "assistant")
        assert isinstance(sample.prompt, str)
        return self._wrap(sample.prompt)

    def document(self, sample: Sample) -> str:
        """The whole sample as text, without the end-of-sequence token that `tokens_of_document` adds."""
        if self.is_chat(sample.prompt):
            messages = [*self.conversation(sample.prompt), *_turns(sample.completion)]
            return self._render(messages, sample, open_turn=False)
        assert isinstance(sample.prompt, str) and isinstance(sample.completion, str)
        return (self._wrap(sample.prompt) if sample.prompt else "") + sample.completion

    def encode(self, text: str, chat: bool) -> np.ndarray:
        """int32 `[tokens]`. Templates write their own special tokens; plain text gets the tokenizer's
        beginning-of-sequence token, but never an end."""
        if self.tokenizer.is_fast:
            # Straight to the Rust tokenizer: what transformers puts around it costs five times as much as the work.
            tokens = self.tokenizer.backend_tokenizer.encode(text, add_special_tokens=not chat).ids
        else:
            tokens = self.tokenizer(text, add_special_tokens=not chat, verbose=False)["input_ids"]
        if not chat and len(tokens) and tokens[-1] == self.tokenizer.eos_token_id:
            tokens = tokens[:-1]
        return np.asarray(tokens, np.int32)

    def count(self, texts: Sequence[str], chat: Sequence[bool]) -> list[int]:
        """Tokens of each text, as `encode` makes them."""
        counts = np.zeros(len(texts), np.int64)
        for kind in (False, True):
            chosen = [i for i, is_chat in enumerate(chat) if is_chat == kind]
            if chosen:
                encoded = self.tokenizer([texts[i] for i in chosen], add_special_tokens=not kind, verbose=False)
                for i, tokens in zip(chosen, encoded["input_ids"], strict=True):
                    ends = not kind and len(tokens) and tokens[-1] == self.tokenizer.eos_token_id
                    counts[i] = len(tokens) - int(bool(ends))
        return [int(count) for count in counts]

    def tokens_of_document(self, sample: Sample) -> tuple[np.ndarray, np.ndarray]:
        """(tokens int32, learned bool), both `[tokens]`: completions, answers or assistant turns are learned.

        Raises:
            BadRow: nothing can be learned, or the template does not tell which turns are the assistant's.
        """
        if self.is_chat(sample.prompt):
            tokens, mask = self._conversation_tokens(sample)
        else:
            tokens, mask = self._text_tokens(sample)
        if mask.size:
            mask[0] = False
        if not mask.any():
            raise BadRow(None, "there is nothing to learn: no completion and no assistant turn", "Leave the row out.")
        return tokens, mask

    def _wrap(self, prompt: str) -> str:
        return prompt if self._cfg.template is None else self._cfg.template.format(prompt=prompt)

    def conversation(self, prompt: Content) -> list[Message]:
        """The prompt as messages, with the configured system message where it has none."""
        messages = [{"role": "user", "content": self._wrap(prompt)}] if isinstance(prompt, str) else list(prompt)
        if self._cfg.system and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": self._cfg.system})
        return messages

    def _render(self, messages: list[Message], sample: Sample, *, open_turn: bool) -> str:
        from jinja2 import TemplateError

        # A prompt that ends within the assistant's turn is continued, not answered.
        begun = open_turn and messages[-1]["role"] == "assistant"
        try:
            text = self.tokenizer.apply_chat_template(
                messages,
                tools=sample.tools or self._tools,
                tokenize=False,
                add_generation_prompt=open_turn and not begun,
                continue_final_message=begun,
                **sample.template_arguments,
            )
        except (TemplateError, TypeError, ValueError) as error:
            remedy = "Change the messages or set model.chat_template."
            raise BadRow(None, f"the chat template refuses the conversation: {error}", remedy) from error
        return str(text)

    def _text_tokens(self, sample: Sample) -> tuple[np.ndarray, np.ndarray]:
        assert isinstance(sample.prompt, str) and isinstance(sample.completion, str)
        self.need_eos()
        tokens = self.encode(self.document(sample), chat=False)
        known = 0
        if sample.prompt:
            # The prompt's tokens are those that generation starts from, even where a merge would cross its end.
            prompt = self.encode(self._wrap(sample.prompt), chat=False)
            known = prompt.size
            if not np.array_equal(tokens[:known], prompt):
                tokens = np.concatenate([prompt, self.encode(sample.completion, chat=True)])
        tokens = np.append(tokens, np.int32(self.tokenizer.eos_token_id))
        return tokens, np.arange(tokens.size) >= known

    def _conversation_tokens(self, sample: Sample) -> tuple[np.ndarray, np.ndarray]:
        history = self.conversation(sample.prompt)
        messages = [*history, *_turns(sample.completion)]
        first = 0 if sample.learn_history else len(history)
        wanted = [n for n in range(first, len(messages)) if messages[n]["role"] == "assistant"]
        text = self.document(sample)
        spans: list[Span] = []
        if wanted and _GENERATION.search(self._template(sample)):
            spans = self._generation_spans(messages, sample)
            roles = [message["role"] for message in messages]
            if len(spans) == roles.count("assistant"):
                spans = spans[len(spans) - len(wanted) :]
            elif not sample.learn_history:
                begin = len(self._render(history, sample, open_turn=False))
                spans = [span for span in spans if span[0] >= begin]
            return self._mask(text, spans)
        for n in wanted:
            spans.append(self._turn_span(messages, n, sample, text))
        return self._mask(text, spans, trim=True)

    def _template(self, sample: Sample) -> str:
        return str(self.tokenizer.get_chat_template(tools=sample.tools))

    def _generation_spans(self, messages: list[Message], sample: Sample) -> list[Span]:
        """Where the template's generation blocks lie in the rendered text.

        The same renderer as `return_assistant_tokens_mask`, which loses all further turns when a block begins
        with a character that no token holds.
        """
        from transformers.utils.chat_template_utils import render_jinja_template

        arguments = {**self.tokenizer.special_tokens_map, **sample.template_arguments}
        _, spans = render_jinja_template(
            conversations=[messages],
            tools=sample.tools,
            chat_template=self._template(sample),
            return_assistant_tokens_mask=True,
            **arguments,
        )
        return [(int(start), int(stop)) for start, stop in spans[0]]

    def _turn_span(self, messages: list[Message], turn: int, sample: Sample, text: str) -> Span:
        """Where an assistant turn lies in the text, from what the template makes of the turns before it."""
        before = self._render(messages[:turn], sample, open_turn=True) if turn else ""
        after = self._render(messages[: turn + 1], sample, open_turn=False)
        if not (text.startswith(before) and text.startswith(after) and len(before) < len(after)):
            raise BadRow(
                None,
                f"the chat template renders message {turn} differently within the whole conversation, so the "
                "assistant's tokens cannot be told",
                "Set model.chat_template to a template with {% generation %} blocks.",
            )
        return len(before), len(after)

    def _mask(self, text: str, spans: Sequence[Span], trim: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """Tokens of the text, and which lie within the spans; `trim` ends a span with its last eos token, as what a
        template writes after it is never generated."""
        if not self.tokenizer.is_fast:
            raise TokenizerError(self.tokenizer, "offsets of its tokens", "Use its fast version for conversations.")
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        tokens = np.asarray(encoded["input_ids"], np.int32)
        begins, ends = np.asarray(encoded["offset_mapping"], np.int64).reshape(-1, 2).T
        mask = np.zeros(tokens.size, np.bool_)
        for start, stop in spans:
            inside = np.flatnonzero((begins < stop) & (np.maximum(ends, begins + 1) > start))
            last = inside[tokens[inside] == self.tokenizer.eos_token_id] if trim else inside[:0]
            mask[inside if not last.size else inside[inside <= last[-1]]] = True
        return tokens, mask


def _turns(completion: Content | None) -> list[Message]:
    if isinstance(completion, str):
        return [{"role": "assistant", "content": completion}]
    return list(completion or [])


def _check_template(template: str) -> None:
    try:
        first, second = template.format(prompt="\x00"), template.format(prompt="\x01")
    except (KeyError, IndexError, ValueError, AttributeError) as error:
        raise ValueError(
            f"data.template {template!r} cannot be filled in ({type(error).__name__}: {error}): it knows {{prompt}} "
            "only, and other braces must be doubled"
        ) from error
    if first == second:
        raise ValueError(f"data.template {template!r} does not contain {{prompt}}")
