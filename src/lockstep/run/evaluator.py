"""Evaluates on held-out prompts: samples completions, scores them, and keeps a few for people to read."""

from collections.abc import Sequence

import numpy as np

from lockstep.config.rollout import SamplingConfig
from lockstep.config.run_config import EvaluationConfig
from lockstep.data.samples import Completion, Group, Prompt, Rollouts
from lockstep.ledger.ledger import Ledger
from lockstep.ledger.sqlite_index import EvaluationSample
from lockstep.rewards.reward_metrics import breakdown_metrics, checked_exact_match
from lockstep.rewards.scorer_pool import ScorerPool
from lockstep.rollout.client.rollout_client import RolloutClient
from lockstep.run.run_reporter import RunReporter

EXACT_MATCH = "eval/exact_match"


class Evaluator:
    """Evaluates versions of the weights: each at most once, all with the same seeds."""

    def __init__(
        self,
        config: EvaluationConfig,
        prompts: Sequence[Prompt],
        sampling: SamplingConfig,
        engines: RolloutClient,
        rewards: ScorerPool | None,
        ledger: Ledger,
        reporter: RunReporter,
    ) -> None:
        self.config, self.prompts = config, list(prompts)
        self.sampling = config.sampling or sampling
        self.engines, self.rewards, self.ledger, self.reporter = engines, rewards, ledger, reporter
        self.history = {row.step + 1: row.metrics for row in ledger.evaluations()}
        """Metrics by version."""
        self._reported: set[int] = set()

    def due(self, version: int, last: bool) -> bool:
        """Whether to evaluate: before the first step, every `every` steps and after the last; never twice."""
        periodic = self.config.every > 0 and version % self.config.every == 0
        return version not in self.history and (version == 0 or last or periodic)

    def metric(self, version: int) -> float | None:
        """The metric that selects the best checkpoint: the mean reward if there is one, else exact match (which stays
        at zero if completions contain reasoning, as in mathematics)."""
        metrics = self.history.get(version, {})
        return metrics.get("eval/reward_mean", metrics.get(EXACT_MATCH))

    def improved(self, version: int) -> bool:
        """Whether this version was evaluated, by this attempt or an earlier one, and is better than all before it."""
        value = self.metric(version)
        earlier = [self.metric(each) for each in self.history if each < version]
        return value is not None and all(value > other for other in earlier if other is not None)

    def report_again(self, version: int) -> None:
        """Reports the evaluation of an earlier attempt again, if there is one: on resuming, the metric sinks were cut
        back to the checkpoint before it."""
        if version in self.history and version not in self._reported:
            self._reported.add(version)
            self.reporter.evaluated(version, self.history[version])

    def evaluate(self, version: int) -> None:
        """Evaluates the weights that the engines serve."""
        completions = self.engines.sample(self.prompts, self.sampling, "evaluation")
        groups = [Group(prompt, [completion]) for prompt, completion in zip(self.prompts, completions, strict=True)]
        metrics = _evaluation_metrics(groups)
        if self.rewards is not None:
            groups = self.rewards.score(Rollouts(-1, version, groups)).groups
            metrics["eval/reward_mean"] = float(np.mean([group.rewards for group in groups]))
            metrics |= breakdown_metrics(groups, "eval/reward/")
        self.history[version] = metrics
        self.ledger.record_evaluation(version - 1, metrics, self._samples(groups))
        self._reported.add(version)
        self.reporter.evaluated(version, metrics)

    def _samples(self, groups: Sequence[Group]) -> list[EvaluationSample]:
        return [
            EvaluationSample(
                uid=group.prompt.uid,
                prompt=group.prompt.text,
                completion=group.completions[0].text,
                answer=group.prompt.answer,
                scores=_sample_scores(group),
                finish=group.completions[0].finish,
                messages=None if (episode := group.completions[0].episode) is None else episode.messages,
            )
            for group in groups[: self.config.samples_shown]
        ]


def _evaluation_metrics(groups: Sequence[Group]) -> dict[str, float]:
    completions: list[Completion] = [group.completions[0] for group in groups]
    metrics = {
        "eval/length_mean": float(np.mean([completion.generated for completion in completions])),
        "eval/truncated": float(np.mean([completion.finish == "length" for completion in completions])),
    }
    answered = [group for group in groups if group.prompt.answer is not None]
    if answered:
        metrics[EXACT_MATCH] = float(
            np.mean([checked_exact_match(group.completions[0].text, group.prompt.answer) for group in answered])
        )
    return metrics


def _sample_scores(group: Group) -> dict[str, float]:
    scores = {name: float(values[0]) for name, values in group.breakdown.items()}
    if group.rewards is not None:
        scores["reward"] = float(group.rewards[0])
    if group.prompt.answer is not None:
        scores["exact_match"] = checked_exact_match(group.completions[0].text, group.prompt.answer)
    return scores
