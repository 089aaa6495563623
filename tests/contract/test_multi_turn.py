"""Conversations of a real engine with real environments, with a check of every token."""

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lockstep.cluster.protocol import WorkerSpec
from lockstep.config.data import DatasetConfig
from lockstep.config.model import ModelConfig
from lockstep.config.rollout import BuiltinEngineConfig, EnvironmentConfig, SamplingConfig
from lockstep.data.dataset_rows import JsonLines
from lockstep.data.forest_builder import forest_from_rollouts
from lockstep.data.row_lengths import LengthLimit
from lockstep.data.sample_sources import PromptSource
from lockstep.data.turn_tokenizer import TurnTokenizer
from lockstep.ledger.ledger import Ledger
from lockstep.models.tiny_model import make_tiny
from lockstep.rollout.client.multi_turn import MultiTurnClient
from lockstep.rollout.engine_protocol import ENGINE_SERVICE
from lockstep.rollout.environments.environment_pool import EnvironmentPool
from lockstep.rollout.environments.environment_protocol import EnvironmentFailed
from lockstep.run.rollout_buffer import PromptSampler, RolloutBuffer

HERE = Path(__file__).parent
DIGITS = "0123456789"
"""Tokens that end a turn, so that a random model ends some turns."""


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    made = tmp_path_factory.mktemp("talks")
    make_tiny(made / "model", hidden=32, layers=1, heads=2, kv_heads=1, ffn=48, max_length=256, chat=True, seed=4)
    (made / "data.jsonl").write_text("".join(f'{{"prompt": "{n}+1=", "answer": "{n + 1}"}}\n' for n in range(9)))
    return made


@pytest.fixture(scope="module")
def engine(cluster, home):
    model, settings = ModelConfig(path=str(home / "model")), BuiltinEngineConfig(max_rows=16)
    arguments = {"model": model.model_dump(mode="json"), "engine": settings.model_dump(mode="json"), "threads": 1}
    return cluster.start([WorkerSpec("engine-0", "rollout", 0, ENGINE_SERVICE, arguments)])[0]


class RolloutSetup:
    """The rollout part of a run."""

    def __init__(self, home, cluster, engine, folder, chat, max_tokens=90, seed=0, others=(), **environment):
        if "tools" not in environment:
            environment["path"] = f"conversation_environments.py:{environment['path']}"
        self.config = EnvironmentConfig(**environment)
        self.tokenizer = AutoTokenizer.from_pretrained(home / "model")
        data = DatasetConfig(path=str(home / "data.jsonl"), chat=chat)
        source = PromptSource(JsonLines(home / "data.jsonl"), data, self.tokenizer, 0, LengthLimit(99), open_turn=False)
        self.prompts = source.take(0, 3)
        self.pool = EnvironmentPool(cluster, self.config, HERE)
        self.pool.start()
        self.ledger = Ledger.create(folder, {"steps": 5})
        sampling = SamplingConfig(max_tokens=max_tokens, stop=tuple(DIGITS))
        turns = TurnTokenizer(self.tokenizer, data)
        self.engines = MultiTurnClient([engine, *others], sampling, seed, pool=self.pool, turns=turns)
        self.metrics: dict[str, float] = {}

    def generate(self, n):
        """`n` completions of each prompt, as step 0."""
        draws = PromptSampler(self.take, self.ledger, len(self.prompts), filtered=False)
        buffer = RolloutBuffer(self.engines, self.ledger, draws, n, steps=1, max_staleness=0)
        rollouts = buffer.take(0, len(self.prompts))
        self.metrics = buffer.metrics(0)
        return rollouts

    def take(self, step, start, count):
        return self.prompts[start : start + count]

    def close(self):
        self.pool.close()
        self.ledger.close()


@pytest.fixture
def second(cluster, home):
    model, settings = ModelConfig(path=str(home / "model")), BuiltinEngineConfig(max_rows=16)
    arguments = {"model": model.model_dump(mode="json"), "engine": settings.model_dump(mode="json"), "threads": 1}
    return cluster.start([WorkerSpec("engine-1", "rollout", 1, ENGINE_SERVICE, arguments)])[0]


@pytest.fixture
def setup(home, cluster, engine, tmp_path):
    made = []

    def make(path, chat=True, folder="a", **options):
        made.append(RolloutSetup(home, cluster, engine, tmp_path / folder, chat, path=path, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


def written(setup, completion) -> list[tuple[bool, str]]:
    """The texts of model and environment in order, as (written by the model, text)."""
    edges = [0, *(np.flatnonzero(np.diff(completion.mask)) + 1), len(completion.tokens)]
    return [
        (bool(completion.mask[a]), setup.tokenizer.decode(completion.tokens[a:b])) for a, b in itertools.pairwise(edges)
    ]


def check_tokens(home, setup, rollouts) -> None:
    """Check that log-probabilities equal those of one forward over the full conversation: no token was lost or changed
    between two turns."""
    model = AutoModelForCausalLM.from_pretrained(home / "model", attn_implementation="eager").eval()
    for group in rollouts.groups:
        for each in group.completions:
            full = torch.from_numpy(np.concatenate([group.prompt.tokens, each.tokens])).long()
            with torch.no_grad():
                every = model(full[None]).logits[0].log_softmax(-1)
            found = every[len(group.prompt.tokens) - 1 : -1].gather(-1, full[len(group.prompt.tokens) :, None])[:, 0]
            np.testing.assert_allclose(found.numpy()[each.mask], each.logprobs[each.mask], atol=1e-4)
            assert (each.logprobs[~each.mask] == 0).all() and (each.versions[~each.mask] == -1).all()
            assert (each.versions[each.mask] == 0).all()


def test_conversations_through_a_chat_template(home, setup) -> None:
    made = setup("Parrot", max_turn_tokens=12, workers=2)
    rollouts = made.generate(4)
    check_tokens(home, made, rollouts)
    assert made.metrics["rollout/prefix_cache_hit_rate"] > 0.2  # later turns begin as the ones before them ended
    several = 0
    for group in rollouts.groups:
        assert group.prompt.text == f"<user>{group.prompt.text[6:]}" and not group.prompt.text.endswith("<assistant>")
        for each in group.completions:
            parts = written(made, each)
            assert parts[0] == (False, "<user>ready?<assistant>")
            lengths = [len(m["content"]) for m in each.episode.messages if m["role"] == "assistant"]
            for (own, text), (_, answer), length in zip(parts[1::2], parts[2::2], lengths, strict=False):
                assert own and (text.endswith("<eos>") or text[-1] in DIGITS)
                closing = "" if text.endswith("<eos>") else "<eos>"  # the template ends a turn that did not
                assert answer == f"{closing}<user>you wrote {length}.<assistant>"
            several += each.episode.turns > 1
            assert len(each.episode.rewards) == each.episode.turns - (each.finish == "length")
            assert each.text == [m["content"] for m in each.episode.messages if m["role"] == "assistant"][-1]
    assert several


def test_a_conversation_stays_on_its_engine(home, setup, second) -> None:
    made = setup("Parrot", max_turn_tokens=12, workers=2, others=[second])
    router, went = made.engines._pool._router, {}
    choose = router.choose_engine

    def noted(group, load):
        chosen = choose(group, load)
        for id in group.ids:
            went.setdefault(id.rpartition("/turn")[0], []).append(chosen)
        return chosen

    router.choose_engine = noted
    check_tokens(home, made, made.generate(4))
    assert all(len(set(each)) == 1 for each in went.values()) and max(map(len, went.values())) > 2
    assert {each[0] for each in went.values()} == {0, 1}
    assert made.metrics["rollout/prefix_cache_hit_rate"] > 0.2


def test_a_resumed_step_continues_as_without_interruption(setup) -> None:
    made = setup("Parrot", max_turn_tokens=12)
    full = made.generate(4)
    kept = [group.completions[k] for group in full.groups for k in (0, 3)]
    made.pool.close()
    again = setup("Parrot", max_turn_tokens=12, folder="b")
    again.ledger.keep(0, kept)
    resumed = again.generate(4)
    assert again.metrics["rollout/generated"] == 6
    for one, other in zip(full.groups, resumed.groups, strict=True):
        for a, b in zip(one.completions, other.completions, strict=True):
            assert a.tokens.tolist() == b.tokens.tolist() and a.episode == b.episode


def test_plain_text_replies_are_appended_unchanged(home, setup) -> None:
    made = setup("Parrot", chat=False, arguments={"opens": False}, max_turn_tokens=12)
    rollouts = made.generate(4)
    check_tokens(home, made, rollouts)
    talks = [written(made, each) for group in rollouts.groups for each in group.completions]
    assert all(own for (own, _), *_ in talks)
    answers = [text for talk in talks for own, text in talk if not own]
    assert answers and all(text.startswith("you wrote") for text in answers)


def test_limits_end_conversations_and_are_counted(setup) -> None:
    made = setup("Parrot", arguments={"turns": 99}, max_tokens=60, max_turns=2, max_turn_tokens=20)
    completions = [each for group in made.generate(6).groups for each in group.completions]
    assert {each.finish for each in completions} == {"length"}
    assert {each.episode.ended for each in completions} <= {"turns", "tokens"}
    assert all(len(each.tokens) <= 60 and each.episode.turns <= 2 for each in completions)


def test_branches_share_their_first_turns(home, setup) -> None:
    made = setup("Parrot", branches=(2, 2), max_turn_tokens=40, max_tokens=150)
    rollouts = made.generate(8)
    check_tokens(home, made, rollouts)
    for group in rollouts.groups:
        for first in (0, 4):
            turns = {tuple(written(made, each)[1]) for each in group.completions[first : first + 4]}
            assert len(turns) == 1, "the four completions of a branch begin with the same turn"
        assert len({tuple(written(made, each)[1]) for each in group.completions}) == 2
    forest = forest_from_rollouts(rollouts)
    forest.check_sequences()
    assert len(forest) == len(rollouts.groups)
    terms = np.bincount(forest.term_segment, minlength=len(forest.length))
    below_a_prompt = forest.parent >= 0
    assert (forest.length * (terms - 1))[below_a_prompt].sum() > 0


@pytest.mark.parametrize("on_error", ["tell", "end", "stop"])
def test_failures_are_shown_to_the_model_or_end_the_sample_or_the_run(home, setup, on_error) -> None:
    made = setup("Fails", on_error=on_error, max_turn_tokens=40, max_tokens=200, max_turns=3)
    if on_error == "stop":
        with pytest.raises(
            EnvironmentFailed, match=r"(?s)not again.*sample: 1/0:\d/\d, turn 1.*conversation_environments.py"
        ):
            made.generate(4)
        return
    rollouts = made.generate(4)
    check_tokens(home, made, rollouts)
    completions = [each for group in rollouts.groups for each in group.completions]
    failed = [each for each in completions if each.episode.metrics.get("errors")]
    assert failed
    if on_error == "end":
        assert {(each.finish, each.episode.ended) for each in failed} == {("abort", "error")}
    else:
        error_replies = [
            m["content"] for each in failed for m in each.episode.messages if m["content"].startswith("error")
        ]
        assert set(error_replies) == {"error: raised ValueError: not again"}
