"""Turns samples into tokens: renders chat templates, and marks the tokens to learn.

The mask of a conversation comes from the template's `{% generation %}` blocks. Without such blocks, the conversation is
rendered turn by turn, which raises BadRow if the template rewrites earlier turns.
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from string import Formatter
from typing import TYPE_CHECKING, Any

import numpy as np

from lockstep.config.data import DatasetConfig
from lockstep.data.dataset_format import Content, DatasetSample, Message
from lockstep.data.dataset_rows import BadRow
from lockstep.data.images.content_forms import ContentForms
from lockstep.data.images.image_content import MARKER, split_at_markers
from lockstep.data.images.image_errors import AdjacentImages, PlaceholderMismatch
from lockstep.data.images.image_processor import ExpandedText, ImageProcessor, encode_with_offsets
from lockstep.data.template_limits import MAX_TEXT_CHARS, TemplateLimitReached, render_chat, render_within_limits

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer

CharSpan = tuple[int, int]
_GENERATION_BLOCK = re.compile(r"\{%-?\s*generation\s*-?%\}")


class TokenizerError(ValueError):
    """The tokenizer lacks a feature that the data needs."""

    def __init__(self, tokenizer: "Tokenizer", missing: str, remedy: str) -> None:
        self.tokenizer, self.missing, self.remedy = str(tokenizer.name_or_path), missing, remedy
        super().__init__(f"the tokenizer {self.tokenizer!r} has no {missing}. {remedy}")


class TemplateRenderer:
    """Renders samples of one dataset for one tokenizer.

    Args:
        tools: schemas of the functions that a model may call, for samples without tools.
        open_turn: whether a prompt includes the beginning of the model's turn. With an environment it does not, because
            the environment may write first (`TurnTokenizer.opening`).
        images: the model's image processor; None for a model that reads no images.

    Raises:
        TokenizerError: conversations are rendered, but the tokenizer has no chat template.
        ValueError: `data.template` cannot be used.
    """

    def __init__(
        self,
        tokenizer: "Tokenizer",
        cfg: DatasetConfig,
        tools: Sequence[dict[str, Any]] = (),
        open_turn: bool = True,
        images: ImageProcessor | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self._images = images
        self._forms = None if images is None else ContentForms(tokenizer, images.placeholder)
        self._cfg, self._tools, self._open_turn = cfg, list(tools) or None, open_turn
        self._writes_tools = False
        """Whether the chat template is known to write tools."""
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
        """Returns whether the chat template applies to a prompt."""
        if isinstance(content, str):
            return bool(self._cfg.chat)
        if self._cfg.chat is False:
            raise BadRow(None, "the prompt is a conversation, but data.chat is false", "Remove data.chat.")
        if self._cfg.template is not None:
            raise BadRow(None, "the prompt is a conversation, but data.template is for text", "Remove data.template.")
        self._need_chat_template()
        return True

    def prompt(self, sample: DatasetSample) -> str:
        """Renders the prompt, up to where the model begins to write. An image is the model's placeholder in it."""
        if self.is_chat(sample.prompt):
            messages = self.conversation(sample)
            return self._render(messages, sample, open_turn=self._open_turn or messages[-1]["role"] == "assistant")
        return _within_limit(self._plain_prompt(sample))

    def document(self, sample: DatasetSample) -> str:
        """Renders the whole sample, without the end-of-sequence token that `tokens_of_document` adds."""
        if self.is_chat(sample.prompt):
            messages = [*self.conversation(sample), *_completion_messages(sample.completion)]
            return self._render(messages, sample, open_turn=False)
        assert isinstance(sample.completion, str)
        return _within_limit((self._plain_prompt(sample) if sample.prompt else "") + sample.completion)

    def expanded(self, text: str, sample: DatasetSample) -> ExpandedText:
        """Expands the placeholders of the sample's images in its rendered text.

        Raises:
            BadRow: the text has more or fewer placeholders than the sample has images, or the model needs text between
                images.
        """
        assert self._images is not None
        try:
            return self._images.expand_text(text, [image.size for image in sample.images])
        except PlaceholderMismatch as error:
            remedy = "Check the chat template, and that no text contains the placeholder."
            raise BadRow(None, str(error), remedy) from error
        except AdjacentImages as error:
            raise BadRow(None, str(error), "Write text between them, or use the chat template (data.chat).") from error

    def encode_prompt(self, text: str, sample: DatasetSample, chat: bool) -> tuple[np.ndarray, list[np.ndarray]]:
        """Tokenizes the rendered prompt of a sample: the tokens, int32 `[tokens]`, and the places of each image's
        features, int32 `[features]`."""
        if not sample.images:
            return self.encode(text, chat), []
        assert self._images is not None
        tokens, places = self._images.encode(self.expanded(text, sample), not chat)
        if not chat and tokens.size and tokens[-1] == self.tokenizer.eos_token_id:
            tokens = tokens[:-1]
        return tokens, places

    def encode(self, text: str, chat: bool) -> np.ndarray:
        """Tokenizes a text: int32 `[tokens]`. Plain text gets the tokenizer's beginning-of-sequence token, but no
        end-of-sequence token; a chat template writes its own special tokens."""
        if self.tokenizer.is_fast:
            # Call the Rust tokenizer directly: transformers' wrapper costs five times as much as the tokenization.
            tokens = self.tokenizer.backend_tokenizer.encode(text, add_special_tokens=not chat).ids
        else:
            tokens = self.tokenizer(text, add_special_tokens=not chat, verbose=False)["input_ids"]
        if not chat and len(tokens) and tokens[-1] == self.tokenizer.eos_token_id:
            tokens = tokens[:-1]
        return np.asarray(tokens, np.int32)

    def count(self, texts: Sequence[str], chat: Sequence[bool]) -> list[int]:
        """Returns the number of tokens that `encode` makes of each text."""
        counts = np.zeros(len(texts), np.int64)
        for kind in (False, True):
            chosen = [i for i, is_chat in enumerate(chat) if is_chat == kind]
            if chosen:
                encoded = self.tokenizer([texts[i] for i in chosen], add_special_tokens=not kind, verbose=False)
                for i, tokens in zip(chosen, encoded["input_ids"], strict=True):
                    ends = not kind and len(tokens) and tokens[-1] == self.tokenizer.eos_token_id
                    counts[i] = len(tokens) - int(bool(ends))
        return [int(count) for count in counts]

    def tokens_of_document(self, sample: DatasetSample) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
        """Returns (tokens int32, learned bool), both `[tokens]`, and the places of each image's features. Completions,
        answers or assistant turns are learned.

        Raises:
            BadRow: there is nothing to learn, or the template does not show which turns are the assistant's.
        """
        if self.is_chat(sample.prompt):
            tokens, mask, places = self._conversation_tokens(sample)
        else:
            tokens, mask, places = self._text_tokens(sample)
        if mask.size:
            mask[0] = False
        if not mask.any():
            raise BadRow(None, "there is nothing to learn: no completion and no assistant turn", "Leave the row out.")
        return tokens, mask, places

    def tokens_of_completions(
        self, sample: DatasetSample, completions: Sequence[Content | None]
    ) -> tuple[np.ndarray, list[np.ndarray], list[np.ndarray]]:
        """Returns the tokens of the sample's prompt, and of each completion of it: int32 `[tokens]` each; then the
        places of each image's features in the prompt.

        The prompt is tokenized alone, as for generation, even if a merge would cross its end. A completion ends with
        the end-of-sequence token, and without what a chat template writes after that.

        Raises:
            BadRow: the template writes the prompt differently when a completion follows.
        """
        prompt_text, chat = self.prompt(sample), self.is_chat(sample.prompt)
        prompt, places = self.encode_prompt(prompt_text, sample, chat)
        sides = []
        for completion in completions:
            text = self.document(replace(sample, completion=completion))
            if not text.startswith(prompt_text):
                remedy = "Set model.chat_template to one that does not rewrite earlier turns."
                raise BadRow(None, "the chat template writes the prompt differently when a completion follows", remedy)
            tokens, _ = self.encode_prompt(text, sample, chat)
            if np.array_equal(tokens[: prompt.size], prompt):
                tokens = tokens[prompt.size :]
            else:
                tokens = self.encode(text[len(prompt_text) :], chat=True)
            sides.append(self._ended(tokens, chat))
        return prompt, sides, places

    def _ended(self, completion: np.ndarray, chat: bool) -> np.ndarray:
        """The completion as a model generates it: up to its end-of-sequence token, which plain text gets here."""
        if not chat:
            self.need_eos()
            return np.append(completion, np.int32(self.tokenizer.eos_token_id))
        ends = np.flatnonzero(completion == self.tokenizer.eos_token_id)
        return completion[: ends[-1] + 1] if ends.size else completion

    def _wrap(self, prompt: str) -> str:
        return prompt if self._cfg.template is None else self._cfg.template.format(prompt=prompt)

    def _plain_prompt(self, sample: DatasetSample) -> str:
        """The prompt of a sample without a chat template."""
        assert isinstance(sample.prompt, str)
        text = self._wrap(sample.prompt)
        return text.replace(MARKER, self._images.placeholder) if sample.images and self._images is not None else text

    def conversation(self, sample: DatasetSample) -> list[Message]:
        """Returns the prompt as messages. Adds the configured system message if the prompt has none."""
        if isinstance(sample.prompt, str):
            text = self._wrap(sample.prompt)
            messages: list[Message] = [{"role": "user", "content": split_at_markers(text) if sample.images else text}]
        else:
            messages = list(sample.prompt)
        if self._cfg.system and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": self._cfg.system})
        return messages

    def _render(self, messages: list[Message], sample: DatasetSample, *, open_turn: bool) -> str:
        from jinja2 import TemplateError

        if self._forms is not None:
            messages = self._forms.fitting(messages)
        # If a prompt ends with an assistant's message, the model continues that message.
        continues = open_turn and messages[-1]["role"] == "assistant"

        def rendered(tools: list[Any] | None) -> str:
            return render_chat(
                self.tokenizer,
                messages,
                tools=tools,
                add_generation_prompt=open_turn and not continues,
                continue_final_message=continues,
                **sample.template_arguments,
            )

        tools = sample.tools or self._tools
        try:
            text = rendered(tools)
            if tools and not self._writes_tools:
                self._writes_tools = text != rendered(None)
        except TemplateLimitReached as error:
            raise BadRow(None, f"the chat template of {error.model} {error.problem}", error.remedy_sentence) from error
        except (TemplateError, TypeError, ValueError) as error:
            remedy = "Change the messages or set model.chat_template."
            raise BadRow(None, f"the chat template refuses the conversation: {error}", remedy) from error
        if tools and not self._writes_tools:
            remedy = "Set model.chat_template to one that does, or leave the tools out."
            raise BadRow(None, "there are tools, and the chat template does not write them", remedy)
        return text

    def _text_tokens(self, sample: DatasetSample) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
        assert isinstance(sample.completion, str)
        self.need_eos()
        tokens, places = self.encode_prompt(self.document(sample), sample, chat=False)
        prompt_size = 0
        if sample.prompt:
            # The prompt is tokenized alone, as for generation, even if a merge would cross its end.
            prompt, places = self.encode_prompt(self._plain_prompt(sample), sample, chat=False)
            prompt_size = prompt.size
            if not np.array_equal(tokens[:prompt_size], prompt):
                tokens = np.concatenate([prompt, self.encode(sample.completion, chat=True)])
        tokens = np.append(tokens, np.int32(self.tokenizer.eos_token_id))
        return tokens, np.arange(tokens.size) >= prompt_size, places

    def _conversation_tokens(self, sample: DatasetSample) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
        history = self.conversation(sample)
        messages = [*history, *_completion_messages(sample.completion)]
        first = 0 if sample.learn_history else len(history)
        learned = [n for n in range(first, len(messages)) if messages[n]["role"] == "assistant"]
        text = self.document(sample)
        spans: list[CharSpan] = []
        if learned and _GENERATION_BLOCK.search(self._template(sample)):
            spans = self._generation_spans(messages, sample)
            roles = [message["role"] for message in messages]
            if len(spans) == roles.count("assistant"):
                spans = spans[len(spans) - len(learned) :]
            elif not sample.learn_history:
                begin = len(self._render(history, sample, open_turn=False))
                spans = [span for span in spans if span[0] >= begin]
            return self._mask(text, spans, sample)
        for n in learned:
            spans.append(self._turn_span(messages, n, sample, text))
        return self._mask(text, spans, sample, trim=True)

    def _template(self, sample: DatasetSample) -> str:
        return str(self.tokenizer.get_chat_template(tools=sample.tools))

    def _generation_spans(self, messages: list[Message], sample: DatasetSample) -> list[CharSpan]:
        """Returns the positions of the template's generation blocks in the rendered text.

        `return_assistant_tokens_mask` uses the same renderer, but loses all further turns if a block begins with a
        character that no token holds.
        """
        from transformers.utils.chat_template_utils import render_jinja_template

        if self._forms is not None:
            messages = self._forms.fitting(messages)
        arguments = {**self.tokenizer.special_tokens_map, **sample.template_arguments}

        def rendered() -> Any:
            return render_jinja_template(
                conversations=[messages],
                tools=sample.tools,
                chat_template=self._template(sample),
                return_assistant_tokens_mask=True,
                **arguments,
            )

        _, spans = render_within_limits(rendered, self.tokenizer)  # `document` has rendered it before
        return [(int(start), int(stop)) for start, stop in spans[0]]

    def _turn_span(self, messages: list[Message], turn: int, sample: DatasetSample, text: str) -> CharSpan:
        """Finds the position of an assistant turn in the text by rendering the turns before it."""
        before = self._render(messages[:turn], sample, open_turn=True) if turn else ""
        after = self._render(messages[: turn + 1], sample, open_turn=False)
        if not (text.startswith(before) and text.startswith(after) and len(before) < len(after)):
            raise BadRow(
                None,
                f"the chat template renders message {turn} differently within the whole conversation, so the "
                "assistant's tokens cannot be found",
                "Set model.chat_template to a template with {% generation %} blocks.",
            )
        return len(before), len(after)

    def _mask(
        self, text: str, spans: Sequence[CharSpan], sample: DatasetSample, trim: bool = False
    ) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
        """Tokenizes the text and marks the tokens within the spans. `trim` ends a span at its last eos token, because
        the model never generates what a template writes after it. The tokens of images are never marked."""
        if not self.tokenizer.is_fast:
            raise TokenizerError(self.tokenizer, "token offsets", "Use its fast version for conversations.")
        images: list[CharSpan] = []
        if sample.images:
            expanded = self.expanded(text, sample)
            text, images = expanded.text, expanded.spans
            spans = [(expanded.moved(start), expanded.moved(stop)) for start, stop in spans]
        tokens, offsets = encode_with_offsets(self.tokenizer, text, special_tokens=False)
        begins, ends = offsets.T
        mask = np.zeros(tokens.size, np.bool_)
        for start, stop in spans:
            inside = np.flatnonzero((begins < stop) & (np.maximum(ends, begins + 1) > start))
            last = inside[tokens[inside] == self.tokenizer.eos_token_id] if trim else inside[:0]
            mask[inside if not last.size else inside[inside <= last[-1]]] = True
        for start, stop in images:
            mask[(begins >= start) & (begins < stop)] = False
        places = self._images.places(tokens, begins, images) if self._images is not None and images else []
        return tokens, mask, places


def _within_limit(text: str) -> str:
    if len(text) > MAX_TEXT_CHARS:
        problem = f"the text has {len(text):,} characters, and the limit is {MAX_TEXT_CHARS:,}"
        raise BadRow(None, problem, "Split it, or leave the row out.")
    return text


def _completion_messages(completion: Content | None) -> list[Message]:
    if isinstance(completion, str):
        return [{"role": "assistant", "content": completion}]
    return list(completion or [])


def _check_template(template: str) -> None:
    """Raises ValueError unless `{prompt}` is the template's only placeholder. A width could ask for any memory."""
    expected = "the only placeholder is {prompt}, and other braces must be doubled"
    try:
        fields = [field[1:] for field in Formatter().parse(template) if field[1] is not None]
    except ValueError as error:
        raise ValueError(f"data.template {template!r} cannot be filled in ({error}): {expected}") from error
    if any(field != ("prompt", "", None) for field in fields):
        raise ValueError(f"data.template {template!r} cannot be filled in: {expected}")
    if not fields:
        raise ValueError(f"data.template {template!r} does not contain {{prompt}}")
