"""The contract of every rollout engine: the builtin one with and without its KV cache, and vLLM if it is installed."""

import copy
import functools
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lockstep.models.tiny_model import make_tiny
from lockstep.rollout.builtin import BuiltinEngine
from lockstep.rollout.builtin.model_forward import use_plain_attention
from lockstep.rollout.builtin.model_runner import CachedRunner
from lockstep.rollout.builtin.plain_runner import PlainRunner
from lockstep.rollout.engine_protocol import Request
from lockstep.rollout.errors import BadRequest, WeightsMismatch

torch.set_num_threads(1)  # tiny matrices: more threads only wait for each other
CONTEXT = 96
RANDOM = np.random.default_rng(0)


@pytest.fixture(scope="module", params=["qwen2", "llama"])
def folder(request, tmp_path_factory):
    """A model whose probabilities differ so much that rounding does not change its choices."""
    made = make_tiny(
        tmp_path_factory.mktemp("engine") / request.param,
        family=request.param,
        hidden=128,  # heads of 32, the smallest that vLLM's kernels know
        heads=4,
        kv_heads=2,
        ffn=64,
        max_length=CONTEXT,
        seed=3,
    )
    lm = AutoModelForCausalLM.from_pretrained(made)
    with torch.no_grad():
        torch.manual_seed(1)
        for parameter in lm.parameters():
            if parameter.ndim == 2:
                parameter.mul_(3.0)
    lm.save_pretrained(made)
    return made


@functools.cache
def loaded(folder):
    return AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)


def load(folder):
    return copy.deepcopy(loaded(folder)[0])


def builtin(folder, **options):
    engine = BuiltinEngine(load(folder), loaded(folder)[1], **options)
    assert isinstance(engine._runner, CachedRunner)
    return engine


def plain(folder, **options):
    engine = builtin(folder, **options)
    use_plain_attention(engine.lm)
    engine._runner = PlainRunner(engine.lm, engine.device, batch_tokens=2048)
    return engine


def vllm(folder, max_rows=256, cache_tokens=None, **options):
    from lockstep.config.model import ModelConfig
    from lockstep.config.rollout import VllmEngineConfig as Config
    from lockstep.rollout.vllm.engine import VllmEngine

    # The smallest blocks that vLLM's CPU kernels support.
    extra = {"block_size": 32}
    if cache_tokens is not None:  # vLLM needs room for at least one sequence of the largest length
        extra["num_gpu_blocks_override"] = CONTEXT // 32 + 1
    config = Config(max_num_seqs=max_rows, cpu_kv_cache_gb=0.02, extra=extra)
    return VllmEngine.from_config(ModelConfig(path=str(folder)), config, threads=1, **options)


ENGINES = [
    pytest.param(builtin, id="builtin"),
    pytest.param(plain, id="builtin-plain"),
    pytest.param(vllm, id="vllm", marks=pytest.mark.vllm),
]


@pytest.fixture(params=ENGINES)
def make(request, folder):
    if request.param is plain and folder.name != "qwen2":
        pytest.skip("nothing of the plain path depends on the architecture")
    if request.param is vllm and find_spec("vllm") is None:
        pytest.skip("needs the extra `vllm`: script/test --vllm")
    made = []

    def engine(**options):
        made.append(request.param(folder, **options))
        return made[-1]

    yield engine
    for each in made:
        each.close()


@pytest.fixture(scope="module")
def reference(folder):
    return load(folder)


def ask(groups=5, size=4, max_tokens=12, lengths=(1, 7, 3, 12, 5), first_seed=0, **fields):
    random = np.random.default_rng(7)
    requests = []
    for group in range(groups):
        prompt = random.integers(4, 60, size=lengths[group % len(lengths)]).astype(np.int32)
        for k in range(size):
            seed = first_seed + 1000 * group + k
            requests.append(Request(f"{group}/{k}", f"g{group}", prompt, seed, **{"max_tokens": max_tokens, **fields}))
    return requests


def finish(engine, limit=2000):
    done = []
    for _ in range(limit):
        done += engine.step()
        now = engine.progress()
        if not now.running and not now.waiting:
            return {completion.request: completion for completion in done}
    raise AssertionError("the engine does not finish")


def run(engine, requests):
    engine.submit(requests)
    done = finish(engine)
    assert done.keys() == {request.id for request in requests}
    return done


@torch.inference_mode()
def full_logprobs(lm, prompt, tokens, temperature=1.0):
    """Log-probabilities of the tokens, float32 `[tokens]`, from one plain forward."""
    sequence = torch.from_numpy(np.concatenate([prompt, tokens]).astype(np.int64)).unsqueeze(0)
    logprobs = torch.log_softmax(lm(sequence).logits[0].float() / temperature, -1)[len(prompt) - 1 : -1]
    return logprobs.gather(1, sequence[0, len(prompt) :, None]).squeeze(1).numpy()


def same(one, other):
    assert one.keys() == other.keys()
    for name in one:
        assert one[name].tokens.tolist() == other[name].tokens.tolist(), name
        np.testing.assert_allclose(one[name].logprobs, other[name].logprobs, atol=1e-4)
        assert (one[name].finish, one[name].text) == (other[name].finish, other[name].text)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_equal_a_plain_forward(make, reference, temperature):
    requests = ask(temperature=temperature, ignore_eos=True, max_tokens=20)
    done = run(make(), requests)
    for request in requests:
        got = done[request.id]
        assert len(got.tokens) == len(got.logprobs) == len(got.versions) == 20
        expected = full_logprobs(reference, request.prompt, got.tokens, temperature)
        np.testing.assert_allclose(got.logprobs, expected, atol=1e-4)


def test_greedy_equals_generate(make, reference):
    requests = ask(size=2, temperature=0.0, max_tokens=25)
    done = run(make(), requests)
    for request in requests:
        prompt = torch.from_numpy(request.prompt.astype(np.int64)).unsqueeze(0)
        expected = reference.generate(
            prompt, do_sample=False, max_new_tokens=25, attention_mask=torch.ones_like(prompt)
        )
        got = done[request.id]
        assert got.tokens.tolist() == expected[0, len(request.prompt) :].tolist()
        np.testing.assert_allclose(
            got.logprobs, full_logprobs(reference, request.prompt, got.tokens), atol=1e-4
        )  # at temperature 1


def test_a_completion_depends_on_its_seed_alone(make):
    requests = ask(groups=6, size=4, max_tokens=15)
    together = run(make(), requests)
    few_rows = run(make(max_rows=3), requests)
    same(together, few_rows)
    same(together, run(make(), list(reversed(requests))))
    alone = make()
    for request in requests[::9]:
        same({request.id: together[request.id]}, run(alone, [request]))
    assert len({tuple(each.tokens) for each in together.values()}) > 12
    other = run(make(), ask(groups=6, size=4, max_tokens=15, first_seed=77))
    assert any(other[name].tokens.tolist() != together[name].tokens.tolist() for name in other)


def test_more_requests_than_rows_with_unequal_lengths(make, reference):
    engine = make(max_rows=5)
    requests = ask(groups=9, size=3)
    for index, request in enumerate(requests):
        request.max_tokens = 1 + (index * 7) % 23
    engine.submit(requests)
    done, most = {}, 0
    while len(done) < len(requests):
        for completion in engine.step():
            done[completion.request] = completion
        now = engine.progress()
        most = max(most, now.running)
        assert now.running <= 5 and now.finished == len(done)
        assert now.waiting + now.running + now.finished == len(requests)
    assert most == 5
    assert engine.progress().tokens == sum(len(each.tokens) for each in done.values())
    for request in requests:
        got = done[request.id]
        assert got.finish == "stop" or len(got.tokens) == request.max_tokens
        expected = full_logprobs(reference, request.prompt, got.tokens)
        np.testing.assert_allclose(got.logprobs, expected, atol=1e-4)


def test_requests_may_be_submitted_while_others_run(make):
    requests = ask(groups=6, size=3, max_tokens=18)
    expected = run(make(), requests)
    engine = make(max_rows=7)
    done, pending = {}, list(requests)
    while len(done) < len(requests):
        if pending:
            engine.submit([pending.pop(0)])
        done.update((completion.request, completion) for completion in engine.step())
    same(expected, done)


def test_eos_ends_a_completion_and_is_part_of_it(make, reference, folder):
    tokenizer = loaded(folder)[1]
    requests = ask(groups=5, size=8, max_tokens=40, temperature=1.5)
    done = run(make(), requests)
    ended = [each for each in done.values() if each.finish == "stop"]
    assert ended and len(ended) < len(done)
    for each in done.values():
        inside = each.tokens[:-1].tolist()
        assert tokenizer.eos_token_id not in inside
        assert (each.tokens[-1] == tokenizer.eos_token_id) == (each.finish == "stop")
        assert each.text == tokenizer.decode(each.tokens, skip_special_tokens=True) and "<eos>" not in each.text
    ignoring = run(make(), ask(groups=5, size=8, max_tokens=40, temperature=1.5, ignore_eos=True))
    assert {len(each.tokens) for each in ignoring.values()} == {40}
    assert all(each.finish == "length" for each in ignoring.values())
    for name, each in done.items():
        assert ignoring[name].tokens[: len(each.tokens)].tolist() == each.tokens.tolist()


def test_stop_strings_stay_in_the_completion(make, folder):
    free = run(make(), ask(max_tokens=30, ignore_eos=True))
    text = next(each.text for each in free.values() if len(each.text) == 30)
    stop = text[11:14]
    done = run(make(), ask(max_tokens=30, ignore_eos=True, stop=("\x00never", stop)))
    stopped = 0
    for name, each in done.items():
        full = free[name].text
        assert full.startswith(each.text)
        if stop in full and len(full) == 30:
            stopped += 1
            assert each.finish == "stop" and each.text == full[: full.index(stop) + len(stop)]
        else:
            assert each.finish == "length"
    assert stopped


def test_abort_returns_the_tokens_so_far(make):
    full = run(make(), ask(max_tokens=20, ignore_eos=True))
    engine = make(max_rows=9)
    requests = ask(max_tokens=20, ignore_eos=True)
    engine.submit(requests)
    for _ in range(6):
        assert engine.step() == []
    aborted = engine.abort(["0/1", "1/2", "4/3", "unknown"])
    assert {each.request for each in aborted} == {"0/1", "1/2", "4/3"}
    assert all(each.finish == "abort" for each in aborted)
    for each in aborted:
        expected = 0 if each.request == "4/3" else 6  # it was still waiting
        assert len(each.tokens) == len(each.logprobs) == len(each.versions) == expected
        assert each.tokens.tolist() == full[each.request].tokens[:expected].tolist()
    done = finish(engine)
    assert done.keys() == full.keys() - {"0/1", "1/2", "4/3"}
    for name, each in done.items():
        assert each.tokens.tolist() == full[name].tokens.tolist()
    engine.submit(requests)  # the ids are free again
    engine.step()
    assert {each.request for each in engine.abort()} == full.keys()
    now = engine.progress()
    assert (now.running, now.waiting) == (0, 0) and engine.step() == []


def test_pause_and_resume(make):
    expected = run(make(), ask(ignore_eos=True))
    engine = make()
    engine.submit(ask(ignore_eos=True))
    for _ in range(3):
        engine.step()
    engine.pause()
    before = engine.progress()
    assert before.paused and [engine.step() for _ in range(3)] == [[], [], []]
    assert engine.progress() == before
    engine.resume()
    same(expected, finish(engine))


class TensorReader:
    """A weight reader over tensors in memory."""

    def __init__(self):
        self.versions = {}

    @contextmanager
    def __call__(self, source, version):
        assert source == Path("shelf")
        yield self.versions[version]


def changed(folder, scale):
    lm = load(folder)
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in lm.parameters():
            parameter.add_(torch.randn_like(parameter) * scale)
    return lm


def test_weights_are_loaded_between_two_tokens(make, folder, reference):
    shelf = TensorReader()
    new = changed(folder, 0.05)
    shelf.versions[4] = dict(new.named_parameters())
    engine = make(reader=shelf, version=3, max_rows=8)
    requests = ask(max_tokens=20, ignore_eos=True)
    engine.submit(requests)
    for _ in range(7):
        engine.step()
    engine.load_weights(Path("shelf"), 4)
    assert engine.version == engine.progress().version == 4
    done = finish(engine)
    crossed = 0
    for request in requests:
        got = done[request.id]
        switch = int((got.versions == 3).sum())
        assert got.versions.tolist() == [3] * switch + [4] * (20 - switch)
        assert switch in (0, 7)
        old = full_logprobs(reference, request.prompt, got.tokens)
        fresh = full_logprobs(new, request.prompt, got.tokens)
        if switch:
            crossed += 1
            np.testing.assert_allclose(got.logprobs[:7], old[:7], atol=1e-4)
            assert np.abs(got.logprobs[7:] - old[7:]).max() > 1e-2
        else:  # started later, some of them in a group that was running: they use no old weights
            np.testing.assert_allclose(got.logprobs, fresh, atol=1e-4)
    assert crossed == 8


def test_a_prompt_is_prefilled_again_with_new_weights(make, folder):
    shelf = TensorReader()
    new = changed(folder, 0.05)
    shelf.versions[1] = dict(new.named_parameters())
    engine = make(reader=shelf)
    first, second = ask(groups=1, size=2, lengths=(9,), max_tokens=10, ignore_eos=True)
    engine.submit([first])
    engine.step()
    engine.load_weights(Path("shelf"), 1)
    engine.submit([second])
    got = finish(engine)["0/1"]
    assert got.versions.tolist() == [1] * 10
    np.testing.assert_allclose(got.logprobs, full_logprobs(new, second.prompt, got.tokens), atol=1e-4)


def test_weights_of_another_shape_are_refused(make, folder):
    shelf = TensorReader()
    tensors = dict(load(folder).named_parameters())
    shelf.versions[1] = {**tensors, "model.extra": torch.zeros(2)}
    shelf.versions[2] = {name: tensor for name, tensor in tensors.items() if "norm" not in name}
    engine = make(reader=shelf)
    with pytest.raises(WeightsMismatch, match=r"1 not in the model \(model.extra\)"):
        engine.load_weights(Path("shelf"), 1)
    with pytest.raises(WeightsMismatch, match="missing from the store"):
        engine.load_weights(Path("shelf"), 2)
    assert engine.version == 0


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"prompt": np.ones(90, np.int32)}, f"'bad' needs 90 prompt tokens .* 102, but the context has {CONTEXT}"),
        ({"prompt": np.zeros(0, np.int32)}, "'bad' has an empty prompt"),
        ({"prompt": np.array([5, 4000], np.int32)}, "'bad' has a prompt token outside"),
        ({"max_tokens": 0}, "'bad' has max_tokens 0"),
        ({"id": "0/0"}, "'0/0' is already open"),
        ({"group": "g0"}, "'bad' has another prompt than the other requests of group 'g0'"),
    ],
)
def test_bad_requests_are_refused_with_their_name(make, fields, match):
    engine = make()
    good = ask(groups=1, size=2)
    bad = Request(**{"id": "bad", "group": "gx", "prompt": np.ones(3, np.int32), "seed": 1, "max_tokens": 12, **fields})
    with pytest.raises(BadRequest, match=match):
        engine.submit([*good, bad])
    now = engine.progress()
    assert (now.waiting, now.running) == (0, 0)
    assert run(engine, good).keys() == {"0/0", "0/1"}


def test_cached_prompts_do_not_hold_back_the_first_request(make):
    def request(name, group, prompt, tokens):
        return Request(name, group, np.arange(5, 5 + prompt, dtype=np.int32), 1, max_tokens=tokens, ignore_eos=True)

    requests = [request("a", "one", 20, 4), request("b", "other", 25, 30), request("c", "one", 20, 4)]
    same(run(make(), requests), run(make(cache_tokens=60), requests))


def test_a_small_cache_holds_back_requests(make, reference):
    requests = ask(groups=6, size=3, max_tokens=12, ignore_eos=True)
    expected = run(make(), requests)
    engine = make(cache_tokens=60)
    same(expected, run(engine, requests))
    if not isinstance(engine, BuiltinEngine):
        return  # vLLM's cache has room for a whole context
    if isinstance(engine._runner, CachedRunner):
        assert 0 < engine._runner.cache.tokens <= 60
    with pytest.raises(BadRequest, match="needs 62 tokens of KV cache, but the engine has 60"):
        engine.submit([Request("big", "b", np.ones(2, np.int32), 1, max_tokens=60)])
