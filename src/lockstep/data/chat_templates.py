"""Turns samples into tokens: renders chat templates, marks the tokens to learn, and adds the tokens between two turns.

The mask of a conversation comes from the template's `{% generation %}` blocks. Without such blocks, the conversation is
rendered turn by turn, which raises BadRow if the template rewrites earlier turns. In a conversation with an
environment,
sampled tokens are never tokenized again: the tokens of the environment's answer, and what the template writes around
it, are appended to them.
"""

import json
import re
from collections.abc import Sequence
from functools import lru_cache
from string import Formatter
from typing import TYPE_CHECKING, Any

import numpy as np

from lockstep.config.data import DatasetConfig
from lockstep.data.dataset_format import Content, DatasetSample, Message
from lockstep.data.dataset_rows import BadRow
from lockstep.data.samples import Prompt
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
    ) -> None:
        self.tokenizer = tokenizer
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
        """Renders the prompt, up to where the model begins to write."""
        if self.is_chat(sample.prompt):
            messages = self.conversation(sample.prompt)
            return self._render(messages, sample, open_turn=self._open_turn or messages[-1]["role"] == "assistant")
        assert isinstance(sample.prompt, str)
        return _within_limit(self._wrap(sample.prompt))

    def document(self, sample: DatasetSample) -> str:
        """Renders the whole sample, without the end-of-sequence token that `tokens_of_document` adds."""
        if self.is_chat(sample.prompt):
            messages = [*self.conversation(sample.prompt), *_completion_messages(sample.completion)]
            return self._render(messages, sample, open_turn=False)
        assert isinstance(sample.prompt, str) and isinstance(sample.completion, str)
        return _within_limit((self._wrap(sample.prompt) if sample.prompt else "") + sample.completion)

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

    def tokens_of_document(self, sample: DatasetSample) -> tuple[np.ndarray, np.ndarray]:
        """Returns (tokens int32, learned bool), both `[tokens]`. Completions, answers or assistant turns are learned.

        Raises:
            BadRow: there is nothing to learn, or the template does not show which turns are the assistant's.
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
        """Returns the prompt as messages. Adds the configured system message if the prompt has none."""
        messages = [{"role": "user", "content": self._wrap(prompt)}] if isinstance(prompt, str) else list(prompt)
        if self._cfg.system and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": self._cfg.system})
        return messages

    def _render(self, messages: list[Message], sample: DatasetSample, *, open_turn: bool) -> str:
        from jinja2 import TemplateError

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

    def _text_tokens(self, sample: DatasetSample) -> tuple[np.ndarray, np.ndarray]:
        assert isinstance(sample.prompt, str) and isinstance(sample.completion, str)
        self.need_eos()
        tokens = self.encode(self.document(sample), chat=False)
        prompt_size = 0
        if sample.prompt:
            # The prompt is tokenized alone, as for generation, even if a merge would cross its end.
            prompt = self.encode(self._wrap(sample.prompt), chat=False)
            prompt_size = prompt.size
            if not np.array_equal(tokens[:prompt_size], prompt):
                tokens = np.concatenate([prompt, self.encode(sample.completion, chat=True)])
        tokens = np.append(tokens, np.int32(self.tokenizer.eos_token_id))
        return tokens, np.arange(tokens.size) >= prompt_size

    def _conversation_tokens(self, sample: DatasetSample) -> tuple[np.ndarray, np.ndarray]:
        history = self.conversation(sample.prompt)
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
            return self._mask(text, spans)
        for n in learned:
            spans.append(self._turn_span(messages, n, sample, text))
        return self._mask(text, spans, trim=True)

    def _template(self, sample: DatasetSample) -> str:
        return str(self.tokenizer.get_chat_template(tools=sample.tools))

    def _generation_spans(self, messages: list[Message], sample: DatasetSample) -> list[CharSpan]:
        """Returns the positions of the template's generation blocks in the rendered text.

        `return_assistant_tokens_mask` uses the same renderer, but loses all further turns if a block begins with a
        character that no token holds.
        """
        from transformers.utils.chat_template_utils import render_jinja_template

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

    def _mask(self, text: str, spans: Sequence[CharSpan], trim: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """Tokenizes the text and marks the tokens within the spans. `trim` ends a span at its last eos token, because
        the model never generates what a template writes after it."""
        if not self.tokenizer.is_fast:
            raise TokenizerError(self.tokenizer, "token offsets", "Use its fast version for conversations.")
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        tokens = np.asarray(encoded["input_ids"], np.int32)
        begins, ends = np.asarray(encoded["offset_mapping"], np.int64).reshape(-1, 2).T
        mask = np.zeros(tokens.size, np.bool_)
        for start, stop in spans:
            inside = np.flatnonzero((begins < stop) & (np.maximum(ends, begins + 1) > start))
            last = inside[tokens[inside] == self.tokenizer.eos_token_id] if trim else inside[:0]
            mask[inside if not last.size else inside[inside <= last[-1]]] = True
        return tokens, mask


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
                list(messages),
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
