"""Reward models as terms: which text they score, what is cut, and what becomes of their scores."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reward_samples import completion, prompt
from reward_server import Reply, serving
from transformers import AutoTokenizer

from lockstep.config.errors import ConfigError
from lockstep.config.loader import check_config
from lockstep.config.reward import ModelReward, RewardConfig
from lockstep.data.forest import Forest
from lockstep.data.forest_builder import forest_of_scored_texts
from lockstep.data.samples import Episode, Group, Prompt, Rollouts
from lockstep.models.tiny_model import make_tiny
from lockstep.rewards.model_reward import ScoredTextWriter, ServedModelTerm, check_model_term, score_normalization
from lockstep.rewards.reward_terms import build_term
from lockstep.rewards.reward_values import BadReward
from lockstep.rewards.scorer_pool import ScorerPool
from lockstep.rewards.scoring_messages import RewardError, RewardSample, ScoringBatch, TermError

TEMPLATE = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}{{ eos_token }}\n{% endfor %}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model") / "rm"
    shape: dict[str, Any] = {"hidden": 16, "layers": 1, "heads": 2, "kv_heads": 1, "ffn": 32, "max_length": 64}
    make_tiny(made, **shape, alphabet="abcdefghijklmnopqrstuvwxyz: \n")
    return made


def tokenizer(folder: Path, template: str | None = TEMPLATE) -> Any:
    loaded = AutoTokenizer.from_pretrained(folder)
    loaded.chat_template = template
    return loaded


def conversation(*messages: tuple[str, str]) -> Prompt:
    said = [{"role": role, "content": content} for role, content in messages]
    return Prompt("0:0", 0, np.zeros(1, np.int32), "the policy's text", said)


def sample(text: str, episode: Episode | None = None) -> RewardSample:
    return RewardSample(0, 0, text, np.zeros(1, np.int32), 1, episode)


class Ranks:
    """Scores each text by its number of tokens, or as `score` says."""

    def __init__(self, longest: int = 63, score: Callable[[int], float] = float) -> None:
        self.longest, self.score, self.budgets = longest, score, list[int]()
        self.forests: list[Forest] = []

    def begin(self, forest: Forest, token_budget: int) -> Callable[[], np.ndarray]:
        self.budgets.append(token_budget)
        self.forests.append(forest)
        terms = zip(forest.term_sequence.tolist(), forest.term_segment.tolist(), strict=True)
        sizes = {number: sum(int(forest.length[each]) for each in forest.path(at)) - 1 for number, at in terms}
        return lambda: np.array([self.score(sizes[number]) for number in sorted(sizes)], np.float32)


def term(folder: Path, ranks: Ranks, budget: int = 32, **changes: Any) -> ServedModelTerm:
    return ServedModelTerm(ModelReward(path=str(folder), **changes), "rm", ranks, budget)


def batches(*texts: str) -> list[ScoringBatch]:
    samples = [RewardSample(0, n, text, np.zeros(1, np.int32), 1) for n, text in enumerate(texts)]
    return [ScoringBatch(0, [prompt(0, text="ask ")], samples)]


def test_texts_and_conversations_are_written_as_the_reward_model_reads_them(folder: Path) -> None:
    plain, chat = prompt(0, text="ask "), conversation(("user", "ask"))
    writer = ScoredTextWriter(tokenizer(folder))
    assert writer.text(plain, sample("yes")) == ("ask yes", False)
    assert writer.text(chat, sample("yes")) == ("u:ask<eos>\na:yes<eos>", True)
    assert ScoredTextWriter(tokenizer(folder), end="template").text(chat, sample("y"))[0].endswith("a:y<eos>\n")
    assert ScoredTextWriter(tokenizer(folder), chat=True).text(plain, sample("y"))[0] == "u:ask <eos>\na:y<eos>"
    with_system = [{"role": "system", "content": "be"}, {"role": "user", "content": "ask"}]
    shown = Prompt("0:0", 0, np.zeros(1, np.int32), "policy's", None, conversation=with_system)
    assert writer.text(shown, sample("y"))[0] == "s:be<eos>\nu:ask<eos>\na:y<eos>"
    begun = conversation(("user", "ask"), ("assistant", "we"))
    assert writer.text(begun, sample("ll"))[0] == "u:ask<eos>\na:well<eos>"
    turns = [{"role": "assistant", "content": "call"}, {"role": "tool", "content": "r"}]
    assert writer.text(chat, sample("r", Episode(turns, [], "turns")))[0] == "u:ask<eos>\na:call<eos>\nt:r<eos>"


def test_tokens_end_once_and_are_those_of_the_text(folder: Path) -> None:
    loaded = tokenizer(folder)
    chat = conversation(("user", "ask"))
    plain, written = ScoredTextWriter(loaded).tokens([(prompt(0, text="ask "), sample("yes")), (chat, sample("y"))])
    assert loaded.decode(plain).removeprefix(loaded.bos_token or "") == "ask yes<eos>"
    assert written.tolist() == loaded("u:ask<eos>\na:y<eos>", add_special_tokens=False)["input_ids"]


def test_a_missing_or_refusing_template_is_named(folder: Path) -> None:
    chat = conversation(("user", "ask"))
    with pytest.raises(BadReward, match="has no chat template: set chat_template of the reward term") as found:
        ScoredTextWriter(tokenizer(folder, None)).tokens([(prompt(0), sample("y")), (chat, sample("y"))])
    assert found.value.position == 1
    with pytest.raises(BadReward, match="refuses the conversation: no roles"):
        ScoredTextWriter(tokenizer(folder, "{{ raise_exception('no roles') }}")).text(chat, sample("y"))
    with pytest.raises(TermError, match=r"reward rm: .* has no chat template"):
        check_model_term(ModelReward(path=str(folder)), "rm", [chat])


def test_completions_of_a_prompt_share_what_they_begin_with() -> None:
    texts = [np.array(each, np.int32) for each in ([5, 6, 7], [5, 6, 8, 9], [5, 6], [4, 1], [4, 1])]
    forest = forest_of_scored_texts(texts, [0, 0, 0, 0, 1], list("abcde"))
    assert forest.names == ["a", "d", "e"]
    assert forest.length.tolist() == [2, 2, 3, 1, 2, 1, 2, 1]
    assert forest.term_sequence.tolist() == [0, 1, 2, 3, 4] and forest.sequences.tolist() == [0, 1, 2, 3, 4]
    assert forest.target_offset.tolist() == [1, 2, 0, 0, 0], "the placeholder after each text"


def test_long_texts_are_cut_on_the_left_and_counted(folder: Path) -> None:
    ranks = Ranks(longest=6)
    made = term(folder, ranks, budget=3)
    scores = made.finish(made.begin(batches("a", "abcdefgh")))
    assert scores.values == [6.0, 6.0] and scores.extras == {"truncated": [0.0, 1.0]}
    assert ranks.budgets == [7], "the longest text and the place of its score"
    tokens = ranks.forests[0].tokens.tolist()
    assert tokens[-7:-1] == tokenizer(folder)("defgh<eos>", add_special_tokens=False)["input_ids"][-6:]
    with pytest.raises(BadReward, match=r"has 13 tokens .* and 6 is the limit.*overlong to truncate") as found:
        term(folder, ranks, overlong="error").begin(batches("a", "abcdefgh"))
    assert found.value.position == 1


def test_scores_are_normalised(folder: Path) -> None:
    made = term(folder, Ranks(), normalize={"mean": 2.0, "std": 0.5})
    scores = made.finish(made.begin(batches("a")))
    assert scores.values == [(6 - 2.0) / 0.5] and scores.extras["score"] == [6.0]
    with pytest.raises(TermError, match=r"config.json of .* has no mean and std .*normalize: \{mean"):
        score_normalization(ModelReward(path=str(folder), normalize=True), "rm")


def rollouts(*texts: str) -> Rollouts:
    made = [completion(text) for text in texts]
    return Rollouts(0, 0, [Group(prompt(0, text="ask "), made), Group(prompt(1, text="ask "), made)])


def test_a_pool_of_served_terms_has_no_processes(folder: Path) -> None:
    terms = (ModelReward(path=str(folder)), ModelReward(path=str(folder), weight=0.5, name="half"))
    config = RewardConfig(terms=terms, batch_size=1)
    served = {n: ServedModelTerm(each, f"t{n}", Ranks(), 32) for n, each in enumerate(terms)}
    pool = ScorerPool(None, config, served=served)  # type: ignore[arg-type]
    found = pool.score(rollouts("a", "abc"))
    assert found.rewards.tolist() == [[9.0, 12.0], [9.0, 12.0]]
    assert set(found.groups[1].breakdown) == {"model", "model/truncated", "half", "half/truncated"}
    assert found.groups[1].breakdown["model"].tolist() == [6.0, 8.0]
    pool.close()


def test_a_score_that_is_not_a_number_names_its_sample(folder: Path) -> None:
    wrong = term(folder, Ranks(score=lambda size: float("nan") if size == 8 else 1.0))
    pool = ScorerPool(None, RewardConfig(terms=(wrong.term,)), served={0: wrong})  # type: ignore[arg-type]
    with pytest.raises(RewardError, match="reward model: returned NaN as a score") as found:
        pool.score(rollouts("a", "abc"))
    assert found.value.uid == "0:0#1" and found.value.completion == "abc"


def grpo(**changes: Any) -> Any:
    values = {
        "recipe": "grpo", "name": "x", "steps": 3, "model": {"path": "m"}, "data": {"path": "d.jsonl"},
        "reward": {"terms": [{"kind": "model", "path": "rm", "ranks": 2}, {"kind": "exact_match"}]}, **changes,
    }  # fmt: skip
    return check_config(values, "test")


def test_every_reward_model_is_a_served_role() -> None:
    terms = [{"kind": "model", "path": "rm", "revision": "v1", "dtype": "bfloat16", "ranks": 2, "threads": 3}]
    made = grpo(reward={"terms": [{"kind": "exact_match"}, *terms, {"kind": "model", "path": "two"}]})
    first, second = made.serve_roles
    assert (first.name, first.section, first.ranks, first.threads) == ("reward_model", "reward.terms.1", 2, 3)
    assert (second.name, second.section, second.fields) == ("reward_model_2", "reward.terms.2", {})
    assert (first.model.head, first.model.path, first.model.revision, first.model.dtype) == (
        "score",
        "rm",
        "v1",
        "bfloat16",
    )
    assert made.policy.served_fields == () and made.reward.scorers == 1
    kl = {"loss": {"kl": {"coefficient": 0.1}}, "reference": {}}
    assert [role.name for role in grpo(**kl).serve_roles] == ["reference", "reward_model"]
    assert grpo(reward={"terms": terms}).reward.scorers == 0
    with pytest.raises(ConfigError, match=r"reward.terms.0.model.normalize"):
        grpo(reward={"terms": [{"kind": "model", "path": "rm", "normalize": {"std": 0}}]})


def test_a_term_with_a_url_is_remote() -> None:
    remote = {"kind": "model", "url": "http://h:1/v1/classify?x=1", "path": "rm", "concurrency": 4}
    made = grpo(reward={"terms": [remote], "workers": 2})
    (term,) = made.reward.terms
    assert made.serve_roles == () and made.reward.scorers == 2 and term.protocol == "classify"
    assert grpo(reward={"terms": [{**remote, "end": "template"}]}).reward.terms[0].end == "template"
    assert check_config(made.model_dump(mode="json"), "a stored config") == made


@pytest.mark.parametrize(("path", "field"), [("classify", "probs"), ("pooling", "data")])
def test_every_version_of_vllm_is_asked_for_the_scores_and_to_cut_long_texts(path: str, field: str) -> None:
    """vLLM up to 0.11.0 knows `activation` only; without `truncate_prompt_tokens` it refuses longer texts, and
    without `truncation_side` it keeps their beginning."""
    rows = [{"index": 0, field: [0.25]}, {"index": 1, field: [-3.0]}]
    with serving(lambda *_: Reply({"object": "list", "data": rows})) as server:
        remote = ModelReward(url=f"{server.url}/{path}", served_model_name="rm")
        (batch,) = batches("a", "b")
        assert build_term(remote, "rm").score(batch, lambda _: None).values == [0.25, -3.0]
    assert server.bodies == [
        {
            "model": "rm", "input": ["ask a", "ask b"], "add_special_tokens": True,
            "use_activation": False, "activation": False, "truncate_prompt_tokens": -1,
            "truncation_side": "left",
        }
    ]  # fmt: skip


def test_conversations_bring_their_special_tokens(folder: Path) -> None:
    """Conversations and plain texts are in different requests, in their order."""

    def reply(number: int, body: dict[str, Any], path: str) -> Reply:
        return Reply({"rewards": [float(text[-1]) for text in body["query"]]})

    prompts = [conversation(("user", "hi")), replace(conversation(), messages=None, text="ask ")]
    samples = [
        RewardSample(row, number, str(number), np.zeros(1, np.int32), 1)
        for number, row in enumerate((0, 0, 0, 1, 1, 0))
    ]
    with serving(reply) as server:
        term = ModelReward(url=f"{server.url}/get_reward", batch_size=2, concurrency=1)
        found = build_term(term, "rm").score(ScoringBatch(0, prompts, samples), lambda _: None)
    assert found.values == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert [(len(body["query"]), body["add_special_tokens"]) for body in server.bodies] == [
        (2, False), (1, False), (2, True), (1, False),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("term", "problem"),
    [
        ({}, "set path to a reward model, or url"),
        ({"url": "http://h/score"}, "must end with /get_reward, /classify or /pooling"),
        ({"url": "ftp://h/pooling"}, "not an http"),
        ({"url": "http://h/pooling", "ranks": 2, "dtype": "float32"}, "dtype, ranks cannot be set with url"),
        ({"path": "rm", "timeout_s": 3, "deadline_s": 9}, "deadline_s, timeout_s cannot be set without url"),
        ({"url": "http://h/get_reward", "path": "rm", "end": "template"}, "no effect on /get_reward.*/classify"),
        ({"url": "http://h/pooling", "chat": True}, "need the reward model's tokenizer"),
        ({"url": "http://h/pooling", "normalize": True}, "reads config.json of path"),
        ({"url": "http://h/pooling", "concurrency": 1}, "less than one request per worker"),
    ],
)
def test_fields_that_contradict_each_other_are_refused(term: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        grpo(reward={"terms": [{"kind": "model", **term}], "workers": 2})
