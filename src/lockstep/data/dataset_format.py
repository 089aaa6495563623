"""Finds the prompt, completion and answer in the columns of a dataset."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from lockstep.base.json_text import MalformedJson, parse_json
from lockstep.config.data import DatasetConfig
from lockstep.data.dataset_rows import BadRow, DataError, DatasetRow, DatasetRows, name_hint
from lockstep.data.images.image_content import MediaColumn, has_parts, place_media, row_values, shown_values

if TYPE_CHECKING:
    from lockstep.data.images.image_source import RowImage

FormatName = Literal["prompt_answer", "prompt_completion", "messages", "verl", "text", "preference"]
Message = dict[str, Any]
Content = str | list[Message]

PROMPT_COLUMNS = ("prompt", "question", "problem", "query", "instruction")
ANSWER_COLUMNS = ("answer", "solution", "ground_truth", "label")
ALPACA_PROMPT, ALPACA_INPUT, ALPACA_OUTPUT = "instruction", "input", "output"
"""Alpaca's columns: the prompt is the instruction, followed by the input if there is one."""
PAIR_COLUMNS = ("chosen", "rejected")
IMAGE_COLUMNS, VIDEO_COLUMNS = ("images", "image"), ("videos", "video")
VERL_COLUMNS = ("data_source", "prompt", "reward_model")
MESSAGE_COLUMNS = ("messages", "conversations", "conversation")
"""Columns with a whole conversation; the others are ShareGPT's."""
SHAREGPT_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "function_response": "tool",
}
"""ShareGPT's roles, and the names that chat templates know."""


@dataclass(slots=True)
class DatasetSample:
    """A row of a dataset, with the roles of its columns resolved."""

    prompt: Content
    """Text, or a conversation up to the turn to generate. Empty in format `text`."""
    completion: Content | None
    """The target of supervised fine-tuning: text, or the turns that follow; None if the data has none."""
    answer: Any
    """Ground truth for the verifiers."""
    columns: dict[str, Any]
    """All columns except the prompt's, unchanged."""
    learn_history: bool = False
    """Whether the assistant turns of the prompt are learned as well, because the row is a whole conversation."""
    rejected: Content | None = None
    """The worse completion of a pair, whose better one is `completion`."""
    tools: list[Any] | None = None
    template_arguments: dict[str, Any] = field(default_factory=dict)
    """TRL's column `chat_template_kwargs`."""
    image_values: list[Any] = field(default_factory=list)
    """The images and videos (`RowVideo`) of the prompt as they are in the data, in the order of their markers or parts
    in it."""
    images: "list[RowImage]" = field(default_factory=list)
    """The same images, and the frames of the videos, found and checked by the source of samples."""


class DatasetFormat:
    """Reads the rows of one dataset as samples.

    Args:
        rows: the data; the constructor uses only its column names.
        cfg: names the format and columns; those it does not name are detected.

    Raises:
        DataError: a column is missing, or several columns could have the same role.
    """

    def __init__(self, rows: DatasetRows, cfg: DatasetConfig) -> None:
        self._rows = rows
        self.name: FormatName = cfg.format if cfg.format != "auto" else self._detect(cfg)
        self._answer = cfg.answer_column
        if cfg.answer_column:
            self._need(cfg.answer_column, "answer_column")
        self._prompt = self._prompt_column(cfg) if self.name != "preference" else self._pair_columns(cfg)
        is_alpaca = self._prompt == ALPACA_PROMPT and not cfg.prompt_column
        self._input = ALPACA_INPUT if is_alpaca and ALPACA_INPUT in rows.columns else None
        if self.name == "prompt_completion":
            self._need("completion", "format")
        elif self.name == "verl":
            for column in VERL_COLUMNS:
                self._need(column, "format")
        self._image = self._media_column(cfg.images.column, "images.column", IMAGE_COLUMNS)
        self._video = self._media_column(cfg.videos.column, "videos.column", VIDEO_COLUMNS)
        if self.name == "prompt_answer" and not self._answer:
            known = (*ANSWER_COLUMNS, ALPACA_OUTPUT) if is_alpaca else ANSWER_COLUMNS
            self._answer = self._one_of(known, "answer_column")

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that a sample keeps: all but the prompt's, and the completion's."""
        pairs = {"prompt_completion": ("completion",), "preference": PAIR_COLUMNS}
        taken = (self._prompt, *pairs.get(self.name, ()))
        return tuple(name for name in self._rows.columns if name not in taken)

    def _detect(self, cfg: DatasetConfig) -> FormatName:
        have = set(self._rows.columns)
        if have.issuperset(VERL_COLUMNS):
            return "verl"
        if have.intersection(MESSAGE_COLUMNS) and not cfg.prompt_column:
            return "messages"
        if cfg.prompt_column or have.intersection(PROMPT_COLUMNS):
            return "prompt_completion" if "completion" in have and not cfg.answer_column else "prompt_answer"
        if "text" in have:
            return "text"
        raise DataError(
            self._rows.path,
            f"no known prompt column among {', '.join(self._rows.columns)}",
            "Expected `prompt`, `messages`, `text` or verl's columns; for another name set data.prompt_column.",
        )

    def _pair_columns(self, cfg: DatasetConfig) -> str:
        """Returns the column of the prompt, "" if it is the beginning that both completions have in common."""
        for column in PAIR_COLUMNS:
            if column not in self._rows.columns:
                remedy = f"{name_hint(column, self._rows.columns)} Pairs need `chosen` and `rejected`."
                raise DataError(self._rows.path, "there is no such column", remedy, column=column)
        if cfg.prompt_column:
            return self._need(cfg.prompt_column, "prompt_column")
        found = self._one_of(PROMPT_COLUMNS, "prompt_column") or self._one_of(MESSAGE_COLUMNS, "prompt_column")
        return found or ""

    def _prompt_column(self, cfg: DatasetConfig) -> str:
        if cfg.prompt_column:
            return self._need(cfg.prompt_column, "prompt_column")
        if self.name == "messages" and (found := self._one_of(MESSAGE_COLUMNS, "prompt_column")):
            return found
        if self.name in ("messages", "text", "verl"):
            return self._need("prompt" if self.name == "verl" else self.name, "prompt_column")
        found = self._one_of(PROMPT_COLUMNS, "prompt_column")
        return found or self._need("prompt", "prompt_column")

    def _media_column(self, given: str | None, setting: str, known: Sequence[str]) -> str | None:
        if given:
            return self._need(given, setting)
        return next((name for name in known if name in self._rows.columns), None)

    def _need(self, column: str, setting: str) -> str:
        if column not in self._rows.columns:
            remedy = f"{name_hint(column, self._rows.columns)} Set data.{setting}."
            raise DataError(self._rows.path, "there is no such column", remedy, column=column)
        return column

    def _one_of(self, known: Sequence[str], setting: str) -> str | None:
        found = [name for name in known if name in self._rows.columns]
        if len(found) > 1:
            role = setting.removesuffix("_column")
            what = f"the columns {' and '.join(map(repr, found))} could both be the {role}"
            raise DataError(self._rows.path, what, f"Set data.{setting} to one of them.")
        return found[0] if found else None

    def read(self, row: int) -> DatasetSample:
        """Reads row number `row`.

        Raises:
            DataError: the row lacks a column, or a value has the wrong type. Names the line or row.
        """
        values = self._rows[row]
        try:
            sample = self._read(values)
            sides = (sample.prompt, sample.completion, sample.rejected)
            if self._image or self._video or any(map(has_parts, sides)):
                self._read_media(sample, values)
            return sample
        except BadRow as bad:
            raise self._rows.data_error(row, bad) from bad

    def _read_media(self, sample: DatasetSample, row: DatasetRow) -> None:
        columns = [
            MediaColumn("image", self._image, row_values(row.get(self._image)) if self._image else []),
            MediaColumn("video", self._video, row_values(row.get(self._video)) if self._video else []),
        ]
        for column in columns:
            if column.name in sample.columns:
                sample.columns[column.name] = shown_values(row[column.name], column.kind)
        for side in (sample.completion, sample.rejected):
            if has_parts(side) and place_media(side or "", [MediaColumn("image"), MediaColumn("video")])[1]:
                remedy = "Write completions as text: only prompts may have images and videos."
                raise BadRow(self._image, "a completion has images", remedy)
        sample.prompt, sample.image_values = place_media(sample.prompt, columns)

    def _read(self, row: DatasetRow) -> DatasetSample:
        if self.name == "preference":
            return self._read_pair(row)
        prompt = _content(row, self._prompt)
        if self._input is not None and row.get(self._input):
            prompt = f"{_text(prompt, self._prompt)}\n{_text(row[self._input], self._input)}"
        answer = _value(row, self._answer) if self._answer else None
        columns = {name: value for name, value in row.items() if name != self._prompt}
        sample = DatasetSample(
            prompt, None, answer, columns, tools=_tools(row), template_arguments=_template_arguments(row)
        )
        if self.name == "prompt_completion":
            sample.completion = _content(row, "completion")
            if isinstance(prompt, str) != isinstance(sample.completion, str):
                raise BadRow(
                    "completion", "prompt and completion must both be text or both be messages", "Convert one of them."
                )
            del columns["completion"]
            sample.answer = answer if self._answer else _text_of(sample.completion)
        elif self.name == "messages":
            _split_conversation(sample, self._prompt, bool(self._answer))
        elif self.name == "text":
            sample.prompt, sample.completion = "", _text(prompt, self._prompt)
        else:
            if self.name == "verl" and not self._answer:
                sample.answer = _ground_truth(row)
            sample.completion = str(sample.answer) if isinstance(sample.answer, str | int | float) else None
        return sample

    def _read_pair(self, row: DatasetRow) -> DatasetSample:
        chosen, rejected = (_completion(row, column) for column in PAIR_COLUMNS)
        if isinstance(chosen, str) != isinstance(rejected, str):
            raise BadRow(
                "rejected", "chosen and rejected must both be text or both be messages", "Convert one of them."
            )
        prompt = _content(row, self._prompt) if self._prompt else None
        if isinstance(prompt, str) and self._input is not None and row.get(self._input):
            prompt = f"{prompt}\n{_text(row[self._input], self._input)}"
        if isinstance(chosen, str) and isinstance(rejected, str):
            if isinstance(prompt, list):
                chosen, rejected = ([{"role": "assistant", "content": text}] for text in (chosen, rejected))
            elif prompt is None:
                prompt, chosen, rejected = _split_texts(chosen, rejected)
        if isinstance(chosen, list) and isinstance(rejected, list):
            prompt, chosen, rejected = _split_conversations(prompt, chosen, rejected)
        assert prompt is not None
        columns = {name: value for name, value in row.items() if name not in (self._prompt, *PAIR_COLUMNS)}
        return DatasetSample(
            prompt, chosen, None, columns, rejected=rejected, tools=_tools(row),
            template_arguments=_template_arguments(row),
        )  # fmt: skip


def _completion(row: DatasetRow, column: str) -> Content:
    """Returns a completion, which may be empty: text, turns, or (LLaMA-Factory) a single turn."""
    value = _value(row, column)
    if isinstance(value, dict):
        value = [value]
    return value if isinstance(value, str | list) and not value else _content({column: value}, column)


def _split_texts(chosen: str, rejected: str) -> tuple[str, str, str]:
    """Takes the beginning that both texts have in common as the prompt, without a blank at its end (as TRL does)."""
    if not (chosen and rejected):
        return chosen or rejected or " ", "", ""  # useless, which the caller notices
    shorter = min(len(chosen), len(rejected))
    size = next((at for at in range(shorter) if chosen[at] != rejected[at]), shorter)
    if size and chosen[size - 1] == " ":
        size -= 1
    if not size:
        raise BadRow("chosen", "there is no prompt: chosen and rejected begin differently", "Add a column `prompt`.")
    return chosen[:size], chosen[size:], rejected[size:]


def _split_conversations(
    prompt: Content | None, chosen: list[Message], rejected: list[Message]
) -> tuple[list[Message], list[Message], list[Message]]:
    """Returns prompt and completions as turns. Completions may be whole conversations that begin with the prompt;
    without a prompt of turns, it is what they have in common (UltraFeedback's column repeats a part of it)."""
    if isinstance(prompt, list):
        if all(side[: len(prompt)] == prompt for side in (chosen, rejected) if side):
            return prompt, chosen[len(prompt) :], rejected[len(prompt) :]
        return prompt, chosen, rejected
    whole = [side for side in (chosen, rejected) if side and side[0]["role"] != "assistant"]
    if prompt is not None and not whole:
        return [{"role": "user", "content": prompt}], chosen, rejected
    size = 0
    while size < min(len(chosen), len(rejected)) and chosen[size] == rejected[size]:
        size += 1
    if size == len(chosen) == len(rejected) and size:
        size -= 1  # equal completions
    if not size:
        raise BadRow("chosen", "there is no prompt: the first turns differ", "Add a column `prompt` or a user's turn.")
    if any(side[size:] and side[size]["role"] != "assistant" for side in (chosen, rejected)):
        problem = f"turn {size} differs and is not the assistant's, so that the completions have different prompts"
        raise BadRow("rejected", problem, "Compare completions of the same prompt.")
    if prompt is not None and not any(prompt.strip() in str(turn.get("content")) for turn in chosen[:size]):
        raise BadRow("prompt", "the conversations do not begin with it", "Leave the column out, or add it to them.")
    return chosen[:size], chosen[size:], rejected[size:]


def _value(row: DatasetRow, column: str) -> Any:
    if column not in row:
        raise BadRow(column, "the row has no such column", f"{name_hint(column, list(row))}")
    return row[column]


def _text(value: Any, column: str) -> str:
    if not isinstance(value, str):
        raise BadRow(column, f"expected text, found {type(value).__name__}", "Write a string.")
    return value


def _content(row: DatasetRow, column: str) -> Content:
    """Returns a column's text or conversation. Raises BadRow if it is empty."""
    value = _value(row, column)
    if isinstance(value, str) and value:
        return value
    if value is None or (isinstance(value, str | list) and not value):
        raise BadRow(column, "is empty", "Fill it in, or leave the row out.")
    if not isinstance(value, list):
        raise BadRow(column, f"expected text or messages, found {type(value).__name__}", "Write a string or a list.")
    return [_message(message, column, number) for number, message in enumerate(value)]


def _message(message: Any, column: str, number: int) -> Message:
    remedy = 'A message is {"role": "user", "content": "..."}.'
    if not isinstance(message, dict):
        raise BadRow(column, f"message {number} is {type(message).__name__}", remedy)
    # Arrow sets fields that only other messages have to null, which templates would print.
    found = {name: value for name, value in message.items() if value is not None}
    if "role" not in found and "from" in found:  # ShareGPT's form
        found["role"], found["content"] = found.pop("from"), found.pop("value", None)
    if not isinstance(found.get("role"), str):
        raise BadRow(column, f"message {number} has no role", remedy)
    found["role"] = SHAREGPT_ROLES.get(found["role"], found["role"])
    if not isinstance(found.get("content"), str | list) and "tool_calls" not in found:
        raise BadRow(column, f"message {number} ({found['role']}) has no content", remedy)
    return found


def _tools(row: DatasetRow) -> list[Any] | None:
    tools = row.get("tools")
    if isinstance(tools, str) and tools.lstrip().startswith("["):
        try:
            tools = parse_json(tools, "the text")
        except MalformedJson as error:
            raise BadRow("tools", f"not JSON: {error.problem}", "Write a list of tools as JSON schemas.") from error
    return tools if isinstance(tools, list) and tools else None


def _template_arguments(row: DatasetRow) -> dict[str, Any]:
    found = row.get("chat_template_kwargs")
    return {name: value for name, value in found.items() if value is not None} if isinstance(found, dict) else {}


def _text_of(completion: Content) -> str:
    if isinstance(completion, str):
        return completion
    content = completion[-1].get("content", "")
    if isinstance(content, str):
        return content
    return "".join(part.get("text", "") for part in content if isinstance(part, dict))


def _split_conversation(sample: DatasetSample, column: str, has_answer: bool) -> None:
    """Splits a conversation before its last turn if that is the assistant's; otherwise all of it is the prompt."""
    messages = sample.prompt
    if isinstance(messages, str):
        raise BadRow(column, "expected a list of messages, found text", "Use format prompt_answer or text.")
    sample.learn_history = True
    if messages[-1]["role"] != "assistant":
        return
    if len(messages) == 1:
        raise BadRow(column, "nothing comes before the assistant's turn", "Begin with a user or system message.")
    sample.prompt, sample.completion = messages[:-1], messages[-1:]
    if not has_answer:
        sample.answer = _text_of(sample.completion)


def _ground_truth(row: DatasetRow) -> Any:
    model = _value(row, "reward_model")
    if not isinstance(model, dict) or "ground_truth" not in model:
        raise BadRow("reward_model", "has no ground_truth", 'verl\'s form is {"style": "rule", "ground_truth": ...}.')
    return model["ground_truth"]
