"""Reward terms of kind model: the score that a reward model gives to prompt and completion.

The text is written with the reward model's own chat template and tokenized by its own tokenizer, so that policy and
reward model may come from different families. What the completions of a prompt begin with is computed once.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from lockstep.base.text import content_text
from lockstep.config.reward import ModelReward, ScoreNormalization
from lockstep.data.forest import Forest
from lockstep.data.forest_builder import forest_of_scored_texts
from lockstep.data.samples import Episode, Prompt
from lockstep.data.template_limits import render_chat
from lockstep.models.model_loader import load_model_config, load_tokenizer
from lockstep.rewards.reward_values import BadReward, check_reward
from lockstep.rewards.scoring_messages import RewardSample, ScoringBatch, TermError, TermScores

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer

Scores = Callable[[], np.ndarray]
"""Waits for the scores of texts, float32 `[texts]`."""


class ServedScores(Protocol):
    """The ranks of a reward model."""

    @property
    def longest(self) -> int:
        """The longest text of the model, in tokens."""

    def begin(self, forest: Forest, token_budget: int) -> Scores:
        """Asks the ranks for the score of every sequence of a forest, and returns at once.

        Args:
            token_budget: tokens per row.
        """


class ScoredTextWriter:
    """Writes prompts with their completions as the texts that a reward model scores.

    Args:
        tokenizer: the reward model's.
    """

    def __init__(self, tokenizer: "Tokenizer", chat: bool = False, end: str = "eos") -> None:
        self._tokenizer, self._chat, self._end = tokenizer, chat, end

    def is_chat(self, prompt: Prompt) -> bool:
        """Whether the chat template writes the text of a prompt, with its special tokens."""
        return self._chat or prompt.scored_conversation is not None

    def text(self, prompt: Prompt, sample: RewardSample) -> tuple[str, bool]:
        """Returns the text, without the end-of-sequence token of plain text, and whether it is a conversation.

        Raises:
            BadReward: the reward model has no chat template for it, or the template refuses it.
        """
        messages = prompt.scored_conversation
        if not self.is_chat(prompt):
            return prompt.text + _plain_completion(sample), False
        if not self._tokenizer.chat_template:
            name = self._tokenizer.name_or_path
            remedy = "set chat_template of the reward term to a Jinja file" if messages else "set chat to false"
            raise BadReward(f"the tokenizer of the reward model {name} has no chat template: {remedy}")
        before = messages if messages is not None else [{"role": "user", "content": prompt.text}]
        text = self._render(_with_completion(before, sample))
        if self._end == "eos" and text.rstrip().endswith(str(self._tokenizer.eos_token)):
            text = text.rstrip()
        return text, True

    def ended_text(self, prompt: Prompt, sample: RewardSample) -> str:
        """Returns the text, with the end-of-sequence token also of plain text. Raises BadReward as `text` does."""
        text, chat = self.text(prompt, sample)
        return text if chat else f"{text}{self._tokenizer.eos_token}"

    def tokens(self, pairs: Sequence[tuple[Prompt, RewardSample]]) -> list[np.ndarray]:
        """Returns the tokens of each text, int32 `[tokens]`. Plain text begins with the tokenizer's
        beginning-of-sequence token, if it has one, and ends with the end-of-sequence token. Raises BadReward."""
        texts = []
        for position, pair in enumerate(pairs):
            try:
                texts.append(self.text(*pair))
            except BadReward as error:
                error.position = position
                raise
        found: list[np.ndarray] = [np.empty(0, np.int32)] * len(texts)
        for conversations in (False, True):
            chosen = [number for number, (_, chat) in enumerate(texts) if chat == conversations]
            if not chosen:
                continue
            settings: dict[str, Any] = {"add_special_tokens": not conversations, "verbose": False}
            encoded = self._tokenizer([texts[number][0] for number in chosen], **settings)["input_ids"]
            for number, tokens in zip(chosen, encoded, strict=True):
                found[number] = np.asarray(tokens if conversations else self._ended(tokens), np.int32)
        return found

    def _ended(self, tokens: list[int]) -> list[int]:
        """Plain text ends with the end-of-sequence token, once."""
        eos = self._tokenizer.eos_token_id
        return tokens if tokens and tokens[-1] == eos else [*tokens, eos]

    def _render(self, messages: list[dict[str, Any]]) -> str:
        from jinja2 import TemplateError

        try:
            return render_chat(self._tokenizer, messages, add_generation_prompt=False)
        except (TemplateError, TypeError, ValueError) as error:
            problem = f"the chat template of the reward model refuses the conversation: {error}"
            raise BadReward(f"{problem}; set chat_template of the reward term to another one") from error


def _plain_completion(sample: RewardSample) -> str:
    if sample.episode is None:
        return sample.text
    return "".join(message["content"] for message in _episode_texts(sample.episode))


def _episode_texts(episode: Episode) -> list[dict[str, Any]]:
    """The messages of a conversation as text, because these reward models read no images."""
    return [
        {**message, "content": str(content) if (text := content_text(content)) is None else text}
        for message in episode.messages
        for content in [message.get("content")]
    ]


def _with_completion(messages: Sequence[dict[str, Any]], sample: RewardSample) -> list[dict[str, Any]]:
    """The conversation with the completion, which continues the last message if that is the model's own."""
    if sample.episode is not None:
        return [*messages, *_episode_texts(sample.episode)]
    if messages and messages[-1].get("role") == "assistant":
        begun = messages[-1]
        return [*messages[:-1], {**begun, "content": f"{begun.get('content') or ''}{sample.text}"}]
    return [*messages, {"role": "assistant", "content": sample.text}]


def text_writer(term: ModelReward) -> ScoredTextWriter:
    """The writer of a term's texts. Raises ModelError."""
    return ScoredTextWriter(load_tokenizer(term.model), term.chat, term.end)


@dataclass(slots=True)
class PendingScores:
    """The scores of a term that ranks are computing."""

    scores: Scores
    truncated: np.ndarray
    """bool `[samples]`: which texts were cut."""


class ServedModelTerm:
    """A reward term whose model the run serves.

    Args:
        token_budget: tokens per packed row.

    Raises:
        ModelError: the model has no tokenizer.
        TermError: the scores are to be normalised, and nothing says how.
    """

    def __init__(self, term: ModelReward, name: str, ranks: ServedScores, token_budget: int) -> None:
        self.term, self.name, self._ranks = term, name, ranks
        self._token_budget = term.token_budget or token_budget
        self._tokenizer = load_tokenizer(term.model)
        self._writer = ScoredTextWriter(self._tokenizer, term.chat, term.end)
        self._normalization = score_normalization(term, name)

    def begin(self, batches: Sequence[ScoringBatch]) -> PendingScores:
        """Asks the ranks for the scores of all samples, and returns at once. Raises BadReward, with the position over
        all batches."""
        pairs = [pair for batch in batches for pair in batch.pairs()]
        uids = [batch.uid(position) for batch in batches for position in range(len(batch))]
        whole = self._writer.tokens(pairs)
        longest = min(self.term.max_length or self._ranks.longest, self._ranks.longest)
        truncated = np.array([tokens.size > longest for tokens in whole], np.bool_)
        if truncated.any() and self.term.overlong == "error":
            position = int(np.argmax(truncated))
            size = whole[position].size
            problem = f"the text has {size} tokens for the reward model, and {longest} is the limit"
            raise BadReward(f"{problem}: set max_length, or overlong to truncate", position)
        texts = [cut_on_the_left(tokens, longest, self._tokenizer.bos_token_id) for tokens in whole]
        numbers = {id(prompt): number for number, (prompt, _) in enumerate(pairs)}
        groups = [numbers[id(prompt)] for prompt, _ in pairs]
        budget = max(self._token_budget, max(text.size for text in texts) + 1)
        return PendingScores(self._ranks.begin(forest_of_scored_texts(texts, groups, uids), budget), truncated)

    def finish(self, pending: PendingScores) -> TermScores:
        """Waits for the scores. Raises BadReward, with the position over all batches, if a score is not finite."""
        raw = pending.scores().astype(np.float64)
        for position, score in enumerate(raw.tolist()):
            check_reward(score, position, "a score")
        scores = TermScores(raw.tolist(), {"truncated": pending.truncated.astype(float).tolist()})
        if self._normalization is not None:
            scores.normalize(self._normalization.mean, self._normalization.std)
        return scores


def cut_on_the_left(tokens: np.ndarray, longest: int, bos: int | None) -> np.ndarray:
    """Returns the text, or of one that is too long the last tokens, after its beginning-of-sequence token."""
    if tokens.size <= longest:
        return tokens
    first = int(tokens[0] == bos)
    return np.concatenate([tokens[:first], tokens[tokens.size - longest + first :]])


def score_normalization(term: ModelReward, name: str) -> ScoreNormalization | None:
    """Returns how scores are normalised; None if they are not. Raises ModelError, TermError."""
    if not isinstance(term.normalize, bool):
        return term.normalize
    if not term.normalize:
        return None
    config = load_model_config(term.model)
    mean, deviation = getattr(config, "mean", None), getattr(config, "std", None)
    if isinstance(mean, int | float) and isinstance(deviation, int | float) and deviation > 0:
        return ScoreNormalization(mean=mean, std=deviation)
    raise TermError(
        name,
        f"normalize is true, and config.json of {term.path} has no mean and std of its scores",
        "give them: normalize: {mean: ..., std: ...}",
    )


def check_model_term(term: ModelReward, name: str, prompts: Sequence[Prompt] = ()) -> None:
    """Checks before anything starts that a reward model can read prompts, and how its scores are normalised.

    Args:
        prompts: examples of the data.

    Raises:
        ModelError: there is no tokenizer.
        TermError: a text cannot be written, or nothing says how scores are normalised.
    """
    score_normalization(term, name)
    if not term.has_tokenizer:
        return
    writer = text_writer(term)
    for prompt in prompts:
        try:
            writer.tokens([(prompt, RewardSample(0, 0, "x", np.zeros(1, np.int32), 1))])
        except BadReward as error:
            raise TermError(name, error.problem) from error
