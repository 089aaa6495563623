"""A language model as a judge of completions: asks it one question per completion and reads the score from its
answer."""

import asyncio
import json
import re
from dataclasses import dataclass
from typing import Any

from jinja2 import StrictUndefined, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from lockstep.base.json_text import MalformedJson, parse_json
from lockstep.base.text import count_noun
from lockstep.config.reward import JudgeReward
from lockstep.data.samples import Prompt
from lockstep.rewards.http_reward import HttpEndpoint, RequestFailed, RequestLimits, RetryableRequestError, run_requests
from lockstep.rewards.reward_functions import ReportScored
from lockstep.rewards.reward_values import BadReward
from lockstep.rewards.scoring_messages import RewardSample, ScoringBatch, TermScores, read_api_key
from lockstep.rewards.verifiers import last_match

_CODE_FENCE = re.compile(r"```(?:json)?\s*\n(.*?)```", re.DOTALL)


class UnreadableScore(RetryableRequestError):
    """The judge's answer contains no score."""


@dataclass(frozen=True, slots=True)
class JudgeScore:
    """The judge's score of a completion."""

    score: float
    """Scaled to 0..1; the configured value if no answer was readable."""
    readable: bool
    latency_s: float
    retries: int


class JudgeTerm:
    """A reward term of kind judge."""

    def __init__(self, term: JudgeReward, name: str, concurrency: int) -> None:
        self.term, self.name, self.concurrency = term, name, concurrency
        limits = RequestLimits(term.timeout_s, term.retries, term.deadline_s)
        url = f"{term.base_url.rstrip('/')}/chat/completions"
        self.endpoint = HttpEndpoint(url, read_api_key(term.api_key_env, name), limits)
        environment = ImmutableSandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=False)
        self._template = environment.from_string(term.template)
        self._cache: dict[str, JudgeScore] = {}
        self._step: int | None = None

    def score(self, batch: ScoringBatch, advance: ReportScored) -> TermScores:
        """Sends one request per question, `concurrency` at once. Equal questions of a step share one request. The first
        failure cancels the others."""
        if batch.step != self._step or not self.term.cache:
            self._step, self._cache = batch.step, {}
        questions = [self._question(position, *pair) for position, pair in enumerate(batch.pairs())]
        positions_of: dict[str, list[int]] = {}
        for position, question in enumerate(questions):
            positions_of.setdefault(question if self.term.cache else f"{position} {question}", []).append(position)
        cached = {question for question in positions_of if question in self._cache}
        advance(sum(len(positions_of[question]) for question in cached))
        verdicts = {question: self._cache[question] for question in cached}
        missing = {question: positions for question, positions in positions_of.items() if question not in cached}
        if missing:
            self._ask_all(batch, missing, questions, verdicts, advance)
        if self.term.cache:
            self._cache |= verdicts
        scores = TermScores(
            [None] * len(batch), {key: [None] * len(batch) for key in ("latency_s", "retries", "cached", "unreadable")}
        )
        for question, positions in positions_of.items():
            for number, position in enumerate(positions):
                _add_score(scores, position, verdicts[question], cached=question in cached or number > 0)
        return scores

    def _ask_all(
        self,
        batch: ScoringBatch,
        positions_of: dict[str, list[int]],
        questions: list[str],
        verdicts: dict[str, JudgeScore],
        advance: ReportScored,
    ) -> None:
        """Asks questions and adds their scores to `verdicts`.

        Args:
            positions_of: the samples that have each question.
            questions: the question of each sample.
        """
        done = 0

        async def ask_one(client: Any, free: asyncio.Semaphore, key: str, positions: list[int]) -> None:
            nonlocal done
            async with free:
                verdicts[key] = await self._ask(client, batch, positions[0], questions[positions[0]])
            advance(len(positions))
            done += 1

        async def ask_all() -> None:
            free = asyncio.Semaphore(self.concurrency)
            async with self.endpoint.client(self.concurrency) as client, asyncio.TaskGroup() as group:
                for key, positions in positions_of.items():
                    group.create_task(ask_one(client, free, key, positions))

        asked, samples = count_noun(len(positions_of), "question"), count_noun(len(batch), "sample")
        why = f"{self.name}: {asked} about {samples} after {count_noun(batch.step, 'step')}"
        run_requests(ask_all(), self.endpoint, why, lambda: done)

    async def _ask(self, client: Any, batch: ScoringBatch, position: int, question: str) -> JudgeScore:
        body = json.dumps(self._request(question)).encode()
        what = f"{self.name} of sample {batch.uid(position)}"
        try:
            answer = await self.endpoint.ask(client, body, self._read_score, what)
        except RequestFailed as error:
            if isinstance(error.last, UnreadableScore) and self.term.unreadable is not None:
                return JudgeScore(self.term.unreadable, False, self.term.timeout_s, self.term.retries)
            raise BadReward(error.problem, position) from error
        return JudgeScore(answer.value, True, answer.latency_s, answer.retries)

    def _request(self, question: str) -> dict[str, Any]:
        messages = [{"role": "user", "content": question}]
        if self.term.system is not None:
            messages.insert(0, {"role": "system", "content": self.term.system})
        optional = {"temperature": self.term.temperature, "max_tokens": self.term.max_tokens}
        configured = {name: value for name, value in optional.items() if value is not None}
        return {"model": self.term.model, "messages": messages, **configured, **self.term.extra}

    def _question(self, position: int, prompt: Prompt, sample: RewardSample) -> str:
        variables: dict[str, Any] = {
            "prompt": prompt.text if prompt.messages is None else _conversation_text(prompt.messages),
            "messages": prompt.messages or [{"role": "user", "content": prompt.text}],
            "completion": sample.text,
            "columns": prompt.columns,
        }
        if prompt.answer is not None:
            variables["answer"] = prompt.answer
        try:
            return self._template.render(variables)
        except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as error:
            raise BadReward(f"the template cannot be filled in: {type(error).__name__}: {error}", position) from error

    def _read_score(self, content: bytes) -> float:
        """Returns the score in an answer, scaled to 0..1. Raises UnreadableScore."""
        text = self._answer_text(content)
        value = (
            _number_in_json(text, self.term.json_key)
            if self.term.json_key
            else _parse_number(last_match(self.term.pattern, text))
        )
        if value is None:
            raise UnreadableScore(f"gave an answer without a score: {self.endpoint.excerpt(text[-400:])!r}")
        if not self.term.lowest <= value <= self.term.highest:
            raise UnreadableScore(
                f"gave the score {value:g}, which is not within {self.term.lowest:g} and {self.term.highest:g}"
            )
        return (value - self.term.lowest) / (self.term.highest - self.term.lowest)

    def _answer_text(self, content: bytes) -> str:
        """Returns the text of the judge's answer. Raises UnreadableScore if the body is not a chat completion, or the
        text is empty."""
        try:
            choice = parse_json(content, "the answer")["choices"][0]
            text = choice["message"]["content"]
        except (MalformedJson, LookupError, TypeError):
            excerpt = self.endpoint.excerpt(content) or "an empty body"
            raise UnreadableScore(f"answered with something other than a chat completion: {excerpt}") from None
        if not isinstance(text, str) or not text.strip():
            truncated = choice.get("finish_reason") == "length"
            raise UnreadableScore(f"gave an empty answer{' (max_tokens is too small)' if truncated else ''}")
        return text


def _add_score(scores: TermScores, position: int, verdict: JudgeScore, cached: bool) -> None:
    scores.values[position] = verdict.score
    scores.extras["cached"][position] = float(cached)
    scores.extras["unreadable"][position] = float(not verdict.readable)
    if not cached:
        scores.extras["latency_s"][position] = verdict.latency_s
        scores.extras["retries"][position] = float(verdict.retries)


def _conversation_text(messages: list[dict[str, Any]]) -> str:
    return "\n\n".join(f"{message.get('role', '')}: {message.get('content', '')}" for message in messages)


def _parse_number(text: object) -> float | None:
    if isinstance(text, bool) or not isinstance(text, str | int | float):
        return None
    try:
        return float(text)
    except (ValueError, OverflowError):
        return None


def _number_in_json(text: str, key: str) -> float | None:
    """The number under a dotted key of the last JSON object in the text that has one."""
    for candidate in [text, *reversed(_CODE_FENCE.findall(text)), *(text[start:] for start in _object_starts(text))]:
        try:
            value, _ = json.JSONDecoder().raw_decode(candidate.strip())
        except (ValueError, RecursionError):
            continue
        for part in key.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        number = _parse_number(value)
        if number is not None:
            return number
    return None


def _object_starts(text: str) -> list[int]:
    """Positions where objects may begin, the last one first. At most 200, because each is tried."""
    return [match.start() for match in re.finditer(r"\{", text)][-200:][::-1]
