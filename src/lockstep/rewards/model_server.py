"""Reward terms of kind model with a url: the score of a reward model behind HTTP.

    /get_reward           {"query": [text, ...], "prompts": [...], "labels": [...]}   OpenRLHF's serve_rm
    /classify, /pooling   {"input": [text, ...], **FIELDS_OF_VLLM}                    vLLM

All say with `add_special_tokens` whether the tokenizer's special tokens are added (OpenRLHF's serve_rm never adds any).
`lockstep serve-reward` answers all of them.
"""

from collections.abc import Mapping
from itertools import groupby
from typing import TYPE_CHECKING, Any

from lockstep.base.json_text import MalformedJson, parse_json
from lockstep.config.reward import ModelReward, ScoreNormalization
from lockstep.data.samples import Prompt
from lockstep.rewards import reward_values
from lockstep.rewards.http_reward import HttpTerm, ServerAnswer
from lockstep.rewards.reward_functions import query_batch
from lockstep.rewards.reward_values import BadReward
from lockstep.rewards.scoring_messages import ScoringBatch, TermScores

if TYPE_CHECKING:
    from lockstep.rewards.model_reward import ScoredTextWriter

FIELDS_OF_VLLM = {
    "use_activation": False,
    "activation": False,
    "truncate_prompt_tokens": -1,
    "truncation_side": "left",
}
"""The scores themselves (`activation` is what 0.11.0 and older know), and longer texts cut to the model's context, of
which the last tokens stay. vLLM refuses them without the third, and without the fourth keeps their beginning."""


class ModelServerTerm(HttpTerm):
    """A reward term of kind model with a url.

    Raises:
        ModelError, TermError: the tokenizer cannot be loaded, or nothing says how scores are normalised.
    """

    def __init__(self, term: ModelReward, name: str, concurrency: int) -> None:
        super().__init__(term, name, concurrency)
        self._reward = term
        self._writer: ScoredTextWriter | None = None
        self._normalization: ScoreNormalization | None = None
        if term.has_tokenizer or term.normalize:  # imports torch, which scorers do not need otherwise
            from lockstep.rewards import model_reward

            self._normalization = model_reward.score_normalization(term, name)
            self._writer = model_reward.text_writer(term) if term.has_tokenizer else None

    def _parts(self, batch: ScoringBatch) -> list[tuple[int, ScoringBatch]]:
        """Conversations and plain texts are in different requests: one field says of all texts whether special tokens
        are added."""
        chats = [self._is_chat(prompt) for prompt, _ in batch.pairs()]
        parts, start = [], 0
        for _, run in groupby(chats):
            end = start + sum(1 for _ in run)
            for first in range(start, end, self.term.batch_size):
                parts.append((first, batch.part(first, min(self.term.batch_size, end - first))))
            start = end
        return parts

    def _is_chat(self, prompt: Prompt) -> bool:
        """Whether a chat template writes the text, with its special tokens."""
        return prompt.scored_conversation is not None if self._writer is None else self._writer.is_chat(prompt)

    def _payload(self, part: ScoringBatch) -> dict[str, Any]:
        queries = query_batch(part)
        special = not any(self._is_chat(prompt) for prompt, _ in part.pairs())
        texts = self._texts(part, queries["query"])
        if self._reward.protocol == "get_reward":
            return {**queries, "query": texts, "add_special_tokens": special}
        body: dict[str, Any] = {"input": texts, "add_special_tokens": special, **FIELDS_OF_VLLM}
        named = self._reward.served_model_name
        return body if named is None else {"model": named, **body}

    def _texts(self, part: ScoringBatch, plain: list[str]) -> list[str]:
        """The texts to score. Without a tokenizer they are prompt and completion as the policy reads and writes them.
        Raises BadReward."""
        if self._writer is None:
            return plain
        written = []
        for position, pair in enumerate(part.pairs()):
            try:
                written.append(self._writer.ended_text(*pair))
            except BadReward as error:
                error.position = position
                raise
        return written

    def _parse_answer(self, answer: ServerAnswer[bytes], count: int) -> TermScores:
        if self._reward.protocol == "get_reward":
            scores = super()._parse_answer(answer, count)
        else:
            values = reward_values.check_rewards(self._vllm_scores(answer.value), count, none_allowed=False)
            timing: dict[str, list[float | None]] = {
                "latency_s": [answer.latency_s] * count,
                "retries": [float(answer.retries)] * count,
            }
            scores = TermScores(values, timing)
        if self._normalization is not None:
            scores.normalize(self._normalization.mean, self._normalization.std)
        return scores

    def _vllm_scores(self, content: bytes) -> list[Any]:
        """The score of each text, in the order of the request. Raises BadReward."""
        key = "probs" if self._reward.protocol == "classify" else "data"
        try:
            result = parse_json(content, "the answer")
        except MalformedJson:
            raise BadReward(f"answered with something other than JSON: {self.endpoint.excerpt(content)}") from None
        rows = result.get("data") if isinstance(result, Mapping) else None
        if not isinstance(rows, list) or not all(isinstance(row, Mapping) and key in row for row in rows):
            raise BadReward(f"answered without a list 'data' of objects with '{key}'", None, result)
        if all(isinstance(row.get("index"), int) for row in rows):
            rows = sorted(rows, key=lambda row: int(row["index"]))
        for position, row in enumerate(rows):
            if not isinstance(row[key], list) or len(row[key]) != 1:
                raise BadReward(
                    "answered with several values for a text: it needs a model with one label", position, row
                )
        return [row[key][0] for row in rows]
