"""Properties of the vLLM engine beyond the protocol: its log-probabilities, updates, prefix cache and refusals."""

import copy
import os
import signal
import sys
import time
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from lockstep.rollout.vllm.vllm_requests import core_request

sys.path.insert(0, str(Path(__file__).parent))
from paused_reader import InterruptibleTensors
from reference_model import changed, error, logits, publish
from stream_endpoints import Feeder, ModelEnd

from lockstep.cluster.protocol import WorkerDied, WorkerSpec
from lockstep.config.model import ModelConfig
from lockstep.config.rollout import VllmEngineConfig as Config
from lockstep.models.errors import ModelError
from lockstep.models.tiny_model import make_tiny
from lockstep.rollout.builtin.sampler import SamplingRows, truncate_distribution
from lockstep.rollout.engine_protocol import ENGINE_SERVICE, EngineAPI, Request, RequestGroup
from lockstep.rollout.errors import BadRequest, InterruptedUpdate, TornEngine, WeightsMismatch
from lockstep.watch.beacon.writer import current_beacon
from lockstep.weights.errors import StaleVersion
from lockstep.weights.shared_memory_transport import StoreReader
from lockstep.weights.stream.channel import StreamChannel

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(find_spec("vllm") is None, reason="needs the extra `vllm`: script/test --vllm"),
]
CONTEXT, READER = 160, "lockstep.weights.shared_memory_transport:StoreReader"


@pytest.fixture(scope="module", params=["tied", pytest.param("untied", marks=pytest.mark.slow)])
def folder(request, tmp_path_factory):
    made = make_tiny(tmp_path_factory.mktemp("vllm") / "m", hidden=128, heads=4, kv_heads=2, ffn=64, max_length=CONTEXT)
    lm = AutoModelForCausalLM.from_pretrained(made)
    if request.param == "untied":
        lm.config.tie_word_embeddings = False
        lm.lm_head.weight = torch.nn.Parameter(torch.randn_like(lm.lm_head.weight) * 0.1)
    with torch.no_grad():
        for parameter in lm.parameters():
            if parameter.ndim == 2:
                parameter.mul_(3.0)
    lm.save_pretrained(made)
    return made


@pytest.fixture
def start():
    """Starts engines, and closes them after the test."""
    from lockstep.rollout.vllm.engine import VllmEngine

    made = []

    def engine(folder, reader=READER, rows=16, extra=None, max_length=None, **options):
        config = Config(max_num_seqs=rows, cpu_kv_cache_gb=0.05, extra={"block_size": 32, **(extra or {})}, **options)
        model = ModelConfig(path=str(folder), max_length=max_length)
        made.append(VllmEngine.from_config(model, config, reader=reader, threads=1))
        return made[-1]

    yield engine
    for each in made:
        each.close()


def ask(count=6, length=70, tokens=20, name="", **fields):
    prompt = np.random.default_rng(3).integers(4, 60, size=length).astype(np.int32)
    settings = {"max_tokens": tokens, "ignore_eos": True, **fields}
    return [Request(f"{name}{k}", name, prompt, seed=k, **settings) for k in range(count)]


def run(engine, requests):
    engine.submit(requests)
    done = {}
    for _ in range(2000):
        done.update((each.request, each) for each in engine.step())
        if len(done) == len(requests):
            return done
    raise AssertionError("the engine does not finish")


def test_log_probabilities_are_those_of_transformers(start, folder):
    requests = ask(length=40)
    assert error(AutoModelForCausalLM.from_pretrained(folder).eval(), requests, run(start(folder), requests)) < 1e-5


@pytest.mark.parametrize(
    "fields",
    [{"top_p": 0.7}, {"top_k": 5}, {"min_p": 0.1}, {"top_k": 8, "top_p": 0.8, "temperature": 0.7}],
    ids=["top-p", "top-k", "min-p", "all"],
)
def test_truncated_distributions_are_those_of_the_builtin_engine(start, folder, fields):
    requests = ask(length=9, **fields)
    done = run(start(folder), requests)
    lm = AutoModelForCausalLM.from_pretrained(folder).eval()
    settings = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, **fields}
    for request in requests:
        got = done[request.id]
        count = len(got.tokens)
        rows = SamplingRows.of(
            np.zeros(count), *(np.full(count, value) for value in settings.values()), torch.device("cpu")
        )
        logprobs = torch.log_softmax(truncate_distribution(logits(lm, request, got.tokens).clone(), rows), -1)
        expected = logprobs.gather(1, torch.from_numpy(got.tokens.astype(np.int64)).unsqueeze(1)).squeeze(1)
        np.testing.assert_allclose(got.logprobs, expected, atol=1e-5)


def updated(start, folder, home):
    """An engine that has generated for a prompt and then loaded other weights; and the model with these weights."""
    new = changed(folder)
    engine = start(folder)
    run(engine, ask(name="before"))
    engine.load_weights(publish(new, home / "store", 4), 4)
    return engine, new


def test_an_updated_engine_equals_a_freshly_loaded_one(start, folder, tmp_path):
    engine, new = updated(start, folder, tmp_path)
    requests = ask(name="after")
    done = run(engine, requests)
    assert error(new, requests, done) < 1e-5
    new.save_pretrained(tmp_path / "new")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "new" / name).write_bytes((folder / name).read_bytes())
    fresh = run(start(tmp_path / "new"), requests)
    for name, each in done.items():
        assert each.tokens.tolist() == fresh[name].tokens.tolist()
        np.testing.assert_allclose(each.logprobs, fresh[name].logprobs, atol=1e-5)
        assert each.versions.tolist() == [4] * len(each.tokens)


def test_loaded_weights_survive_overwriting_of_the_buffer(start, folder, tmp_path):
    engine, new = updated(start, folder, tmp_path)
    for version in (5, 6):
        publish(AutoModelForCausalLM.from_pretrained(folder), tmp_path / "store", version)
    requests = ask(name="after")
    assert error(new, requests, run(engine, requests)) < 1e-5


def test_vllms_own_reload_ends_with_the_same_weights(start, folder, tmp_path, monkeypatch):
    """Models with unknown layers are loaded this way."""
    monkeypatch.setattr("lockstep.rollout.vllm.weight_transfer.plan_tensor_moves", lambda model, shapes: None)
    engine, new = updated(start, folder, tmp_path)
    requests = ask(name="after")
    assert error(new, requests, run(engine, requests)) < 1e-5


def test_without_the_correction_a_tied_head_stays_old(start, folder, tmp_path, monkeypatch):
    """Shows why the correction is needed. If this test fails, vLLM has fixed the error, and the correction can go."""
    monkeypatch.setattr("lockstep.rollout.vllm.weight_transfer.plan_tensor_moves", lambda model, shapes: None)
    monkeypatch.setattr("lockstep.rollout.vllm.weight_transfer.pack_heads", lambda model: None)
    engine, new = updated(start, folder, tmp_path)
    requests = ask(name="after")
    wrong = error(new, requests, run(engine, requests))
    assert wrong > 1e-2 if new.config.tie_word_embeddings else wrong < 1e-5


def test_without_the_cache_salt_prompts_use_old_keys_and_values(start, folder, tmp_path, monkeypatch):
    from lockstep.rollout.vllm import engine as module

    made = core_request
    monkeypatch.setattr(
        module, "core_request", lambda name, request, eos, salt, images=None: made(name, request, eos, "same", images)
    )
    engine, new = updated(start, folder, tmp_path)
    requests = ask(name="after")
    assert error(new, requests, run(engine, requests)) > 1e-3


def test_a_group_prefills_its_prompt_once(start, folder):
    engine = start(folder)
    run(engine, ask(count=5, length=70))
    now = engine.progress()
    assert (now.prefix_cache_queries, now.prefix_cache_hits) == (5 * 70, 4 * 64)  # whole blocks of 32
    run(engine, ask(count=1, length=70, name="later"))
    assert engine.progress().prefix_cache_hits == 5 * 64


def test_more_prompts_than_are_prefilled_at_once(start, folder):
    """vLLM would prefill a prompt in chunks if it does not fit, which its CPU build cannot do with seeds."""
    requests = [request for k in range(5) for request in ask(count=2, length=100 + k, name=f"g{k}/")]
    few = run(start(folder, extra={"max_num_batched_tokens": CONTEXT}), requests)
    many = run(start(folder), requests)
    for name, each in few.items():
        assert each.tokens.tolist() == many[name].tokens.tolist()


class BrokenReader:
    """A reader that fails in the middle of a version."""

    def __init__(self, lm):
        self.tensors, self.opened = dict(lm.named_parameters()), 0

    @contextmanager
    def __call__(self, source, version):
        self.opened += 1
        yield InterruptibleTensors(self.tensors, self._break) if self.opened == 1 else self.tensors

    def _break(self):
        raise OSError("the memory is gone")


def test_an_engine_with_an_incomplete_version_serves_nothing(start, folder):
    engine = start(folder, reader=BrokenReader(changed(folder)))
    engine.submit(ask())
    engine.step()
    with pytest.raises(OSError, match="the memory is gone"):
        engine.load_weights(Path("shelf"), 1)
    assert engine.version == 0
    with pytest.raises(TornEngine, match="while loading weights version 1 and must be replaced"):
        engine.step()
    with pytest.raises(TornEngine):  # a later version does not repair it
        engine.load_weights(Path("shelf"), 2)


def test_weights_streamed_in_buckets_equal_freshly_loaded_ones(start, folder, tmp_path):
    engine, new, feeder = start(folder), changed(folder), Feeder(tmp_path)
    run(engine, ask(name="before"))
    for version in (1, 2):
        feeder.give(engine, new, version)
        requests = ask(name=f"after{version}/")
        done = run(engine, requests)
        assert error(new, requests, done) < 1e-5
        assert {token for each in done.values() for token in each.versions.tolist()} == {version}


def test_an_interrupted_stream_fences_the_engine_until_it_has_a_complete_version(start, folder, tmp_path):
    engine, new = start(folder), changed(folder)
    requests = ask()
    engine.submit(requests)
    engine.step()
    with pytest.raises(InterruptedUpdate, match="weights version 1 did not arrive completely"):
        Feeder(tmp_path, limit_s=2.0).give(engine, new, 1, until=3)
    assert (engine.version, engine.progress().paused, engine.step()) == (0, True, [])
    engine.load_weights(publish(new, tmp_path / "store", 1), 1)
    engine.abort()
    after = ask(name="after")
    assert error(new, after, run(engine, after)) < 1e-5 and not engine.progress().paused


def test_weights_of_another_shape_change_nothing(start, folder, tmp_path):
    lm = changed(folder)
    requests = ask()
    other = copy.deepcopy(lm)
    other.model.norm.weight = torch.nn.Parameter(torch.ones(64))
    engine = start(folder)
    before = run(engine, requests)
    with pytest.raises(WeightsMismatch, match=r"model.norm.weight \[64\].*model.norm.weight \[128\]"):
        engine.load_weights(publish(other, tmp_path / "store", 1), 1)
    again = run(engine, requests)
    assert all(again[name].tokens.tolist() == each.tokens.tolist() for name, each in before.items())


def test_requests_that_wait_for_room_in_the_cache_are_not_running(start, folder):
    """Engines are compared by tokens per running sequence; waiting requests generate none."""
    engine = start(folder, extra={"num_gpu_blocks_override": CONTEXT // 32 + 2})
    requests = [each for k in range(4) for each in ask(count=1, tokens=60, name=f"g{k}-")]
    for k, request in enumerate(requests):
        request.prompt = (request.prompt + k) % 50 + 4  # else they share their blocks
    engine.submit(requests)
    seen, finished = [], 0
    for _ in range(2000):
        finished += len(engine.step())
        now = engine.progress()
        seen.append(now.running)
        assert now.running + now.waiting + now.finished == 4
        if finished == 4:
            break
    assert 1 <= max(seen) <= 2 and now.running == 0


def test_a_sleeping_engine_wakes_for_a_request(start, folder):
    engine = start(folder)
    requests = ask()
    before = run(engine, requests)
    engine.sleep()
    after = run(engine, requests)
    assert all(after[name].tokens.tolist() == each.tokens.tolist() for name, each in before.items())
    engine.submit(ask(name="busy"))
    with pytest.raises(ValueError, match="6 open requests"):
        engine.sleep()


def test_settings_that_vllm_refuses_are_named_at_the_start(start, folder):
    engine = start(folder)
    with pytest.raises(BadRequest, match=r"'hot0' is refused by vLLM: temperature must be in \[0, 2\], got 2.5"):
        engine.submit([*ask(name="fine"), *ask(name="hot", temperature=2.5)])
    assert len(run(engine, ask(name="fine"))) == 6


class CountingReader(StoreReader):
    """Counts how often a version is opened: a complete check would read it as often."""

    opened = 0

    def __call__(self, folder, version):
        self.opened += 1
        return super().__call__(folder, version)


def test_a_version_is_opened_once(start, folder, tmp_path):
    reader = CountingReader()
    start(folder, reader=reader).load_weights(publish(changed(folder), tmp_path / "store", 1), 1)
    assert reader.opened == 1


def test_head_sizes_without_a_vllm_kernel_are_refused_at_the_start(start, tmp_path):
    odd = make_tiny(tmp_path / "odd", hidden=32, heads=4, kv_heads=2, ffn=64, max_length=64)
    with pytest.raises(
        ModelError, match=r"vLLM on host \S+ cannot compute it .*head_dim=8.*rollout.engine.kind=builtin"
    ):
        start(odd)


def test_unknown_vllm_arguments_are_refused_at_the_start(start, folder):
    with pytest.raises(ModelError, match=r"vLLM on host \S+ does not support it"):
        start(folder, extra={"quantization": "gguf-like"})


@pytest.mark.slow
def test_an_engine_killed_in_the_middle_of_an_update_does_not_hold_up_others(cluster, folder, tmp_path):
    config = Config(max_num_seqs=8, cpu_kv_cache_gb=0.02).model_dump(mode="json")
    arguments = {"model": ModelConfig(path=str(folder)).model_dump(mode="json"), "engine": config, "threads": 1}
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])

    def hire(name, **more):
        environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        return cluster.start([WorkerSpec(name, "rollout", 0, ENGINE_SERVICE, arguments | more, environment)])[0]

    new, store = changed(folder), tmp_path / "store"
    publish(new, store, 1)
    (tmp_path / "hold").touch()
    engine = hire(f"engine-{folder.parent.name}", reader="paused_reader:PausedReader")
    update = engine.submit(EngineAPI.load_weights, str(store), 1)
    end = time.monotonic() + 120
    while not (tmp_path / "half").exists():
        assert time.monotonic() < end and not update.done()
        time.sleep(0.02)
    os.kill(engine.pid, signal.SIGKILL)
    with pytest.raises(WorkerDied):
        update.result(why="the update")
    began = time.monotonic()
    publish(new, store, 2)  # overwrites its buffer
    publish(new, store, 3)
    assert time.monotonic() - began < 10
    successor = hire(f"engine-{folder.parent.name}.1", reader=READER, weights=str(store), version=3)
    requests = ask(count=2, length=9)
    successor.submit(EngineAPI.submit, RequestGroup.all_of(requests)).result(why="requests")
    done = {}
    while len(done) < 2:
        answer = successor.submit(EngineAPI.collect).result(why="completions")
        done = {each.request: each for each in answer.completions}
    assert error(new, requests, done) < 1e-5 and set(done["0"].versions.tolist()) == {3}
    cluster.stop(successor, grace_s=5.0)


@pytest.mark.slow
def test_two_tensor_parallel_workers_load_their_own_weights(start, folder, tmp_path):
    engine = start(folder, tensor_parallel_size=2)
    requests = ask()
    assert error(AutoModelForCausalLM.from_pretrained(folder).eval(), requests, run(engine, requests)) < 1e-5
    new = changed(folder)
    store = publish(new, tmp_path / "store", 4)
    with pytest.raises(StaleVersion, match="version 3 of the weights was requested, the store has version 4"):
        engine.load_weights(store, 3)
    assert engine.version == 0 and run(engine, ask(name="still"))
    moves = current_beacon().progress_count
    engine.load_weights(store, 4)
    assert current_beacon().progress_count > moves, "the progress of its workers counts as the engine's"
    assert error(new, requests, run(engine, requests)) < 1e-5


@pytest.mark.slow
def test_two_tensor_parallel_workers_are_both_members_of_a_channel(start, folder, cluster, tmp_path):
    """Over gloo, in addition to vLLM's own communicators; the trainer is another process."""
    engine, new, requests = start(folder, tensor_parallel_size=2), changed(folder), ask()
    new.save_pretrained(tmp_path / "new")
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    name, environment = f"policy-{folder.parent.name}-tp", {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    spec = WorkerSpec(name, "policy", 0, "stream_endpoints:ModelEnd", {"folder": str(tmp_path / "new")}, environment)
    (trainer,) = cluster.start([spec])
    plan = trainer.submit(ModelEnd.plan).result(why="its plan")
    channel = StreamChannel(1, "nccl", "gloo", cluster.store(), name, ("engine",), 2, 50_000, limit_s=60.0)
    for version in (1, 2):  # the channel stays open
        sending = trainer.submit(ModelEnd.stream_weights, channel, version)
        engine.receive_weights(channel.where("engine", plan), version)
        assert sending.result(why="send") == ""
        assert error(new, requests, run(engine, requests)) < 1e-5 and engine.version == version
    cluster.stop(trainer, grace_s=0.0)
    with pytest.raises(InterruptedUpdate, match="version 3"):
        engine.receive_weights(channel.where("engine", plan), 3)
    assert engine.step() == [] and engine.progress().paused
    engine.load_weights(publish(new, tmp_path / "store", 4), 4)
    assert error(new, requests, run(engine, requests)) < 1e-5
