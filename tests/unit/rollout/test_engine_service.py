"""The engine's service: completions are delivered even if answers are lost, and failures reach the controller."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from lockstep.cluster.rpc.codec import signature_of
from lockstep.config.model import ModelConfig
from lockstep.config.rollout import BuiltinEngineConfig as EngineConfig
from lockstep.data.samples import Completion
from lockstep.models.tiny_model import make_tiny
from lockstep.rollout.engine_protocol import CompletionBatch, EngineAPI, Request
from lockstep.rollout.engine_service import EngineService, Outbox
from lockstep.rollout.errors import BadLogits, BadRequest
from lockstep.watch.beacon.writer import current_beacon
from lockstep.weights.weight_plan import WeightPlan
from lockstep.weights.weight_store import WeightStore

torch.set_num_threads(1)  # tiny matrices: more threads only wait for each other


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = make_tiny(tmp_path_factory.mktemp("service") / "m", hidden=16, heads=2, kv_heads=1, ffn=32, max_length=64)
    return ModelConfig(path=str(folder)).model_dump(mode="json")


def service(model, **options):
    return EngineService(model, EngineConfig(max_rows=8).model_dump(mode="json"), **options)


def ask(n, tokens=5):
    prompt = np.array([4, 5, 6], np.int32)
    return [Request(f"r{k}", "g", prompt, seed=k, max_tokens=tokens, ignore_eos=True) for k in range(n)]


def taken(engine, ack=0):
    """The answer of a `collect` call; None if it is not answered yet."""
    answers = []
    engine.collect(ack).on_settled(lambda value, error: answers.append((value, error)))
    for value, error in answers:
        if error is not None:
            raise error
        return value
    return None


def completion(name):
    return Completion(name, np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(0, np.int32), "stop", "")


def test_completions_stay_until_they_are_acknowledged():
    outbox = Outbox()
    assert outbox.collect(0).completions == []
    outbox.put([completion("a"), completion("b")])
    first = outbox.collect(0)
    assert (first.sequence, [each.request for each in first.completions]) == (2, ["a", "b"])
    outbox.put([completion("c")])
    again = outbox.collect(0)  # the first answer was lost
    assert (again.sequence, [each.request for each in again.completions]) == (3, ["a", "b", "c"])
    assert [each.request for each in outbox.collect(first.sequence).completions] == ["c"]
    assert (outbox.collect(3).sequence, outbox.collect(3).completions) == (3, [])
    with pytest.raises(ValueError, match="ack: 4 was never collected"):
        outbox.collect(4)


def request(name, priority=0, keep=False):
    return Request(name, name, np.array([4], np.int32), 0, priority=priority, keep=keep)


def test_completions_are_held_back_for_equally_urgent_ones(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("lockstep.rollout.engine_service.time.monotonic", lambda: now[0])
    outbox = Outbox()
    outbox.expect([request("a", 3), request("b", 3), request("c", 4), request("d", 4)])
    assert not outbox.due(0, 1.0), "there are no completions"
    outbox.put([completion("a")])
    assert outbox.due(0, 0.0) and not outbox.due(0, 1.0)
    now[0] += 1.0
    assert outbox.due(0, 1.0), "`hold_s` has passed"
    outbox.put([completion("b")])
    assert outbox.due(0, 10.0), "the other requests are less urgent"
    assert [each.request for each in outbox.collect(0).completions] == ["a", "b"]
    outbox.acknowledge(2)
    outbox.put([completion("c")])
    assert not outbox.due(2, 1.0)
    outbox.collect(2)
    assert outbox.due(2, 1.0), "the answer that was sent has not arrived"
    outbox.acknowledge(3)
    outbox.put([completion("d")])
    assert outbox.due(3, 1.0), "there are no other requests"


def test_turns_of_conversations_are_sent_at_once():
    for first, done in ((request("a", keep=True), completion("a")), (request("a"), ended("a")), (None, ended("a"))):
        outbox = Outbox()
        outbox.expect([each for each in (first, request("b")) if each is not None])
        outbox.put([done])
        assert outbox.due(0, 60.0)


def ended(name):
    return Completion(name, np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(0, np.int32), "abort", "")


def test_completions_survive_encoding():
    random = np.random.default_rng(0)
    made = [
        Completion(
            str(n),
            random.integers(0, 9, n).astype(np.int32),
            random.normal(size=n).astype(np.float32),
            random.integers(-1, 3, n).astype(np.int32),
            "length" if n else "abort",
            "é" * n,
        )
        for n in (3, 0, 7)
    ]
    signature = signature_of(EngineAPI.collect)
    found = signature.decode_result(bytearray(signature.encode_result(CompletionBatch.of(5, made)))).completions
    for one, other in zip(found, made, strict=True):
        for name in ("request", "finish", "text", "mask", "episode"):
            assert getattr(one, name) == getattr(other, name)
        for name in ("tokens", "logprobs", "versions"):
            assert getattr(one, name).dtype == getattr(other, name).dtype
            assert getattr(one, name).tolist() == getattr(other, name).tolist()
    found[0].tokens[:] = 1  # of its own memory
    made[0].mask = np.ones(3, np.bool_)
    with pytest.raises(ValueError, match="neither a mask nor an episode"):
        CompletionBatch.of(5, made)


def test_an_engine_with_equally_urgent_requests_sends_several_at_a_time(model):
    engine, told = service(model), []
    engine.submit([*ask(2, tokens=3), Request("long", "h", np.array([4], np.int32), 9, max_tokens=9, ignore_eos=True)])
    engine.collect(0, 60.0).on_settled(lambda value, error: told.append(value))
    while engine.background():
        assert told == []
    assert [each.request for each in told[0].completions] == ["r0", "r1", "long"]
    engine.close()


def test_decodes_in_the_background(model):
    engine = service(model)
    assert engine.background() is False
    engine.submit(ask(11))
    with pytest.raises(BadRequest):
        engine.submit(ask(1, tokens=100))
    turns = 0
    while engine.background():
        turns += 1
        assert engine.progress().tokens == min(turns, 5) * 8 + max(0, turns - 5) * 3
    collected = taken(engine)
    assert collected.sequence == 11 and {each.request for each in collected.completions} == {f"r{k}" for k in range(11)}
    assert taken(engine, 11) is None
    engine.submit(ask(3))
    engine.background()
    engine.pause()
    assert engine.background() is False and engine.progress().paused
    engine.abort(["r1"])
    assert [(each.request, each.finish, len(each.tokens)) for each in taken(engine, 11).completions] == [
        ("r1", "abort", 1)
    ]
    engine.resume()
    while engine.background():
        pass
    assert taken(engine, 12).sequence == 14
    engine.close()


def test_collect_is_answered_when_completions_arrive(model):
    engine, told = service(model), []
    engine.submit([*ask(3, tokens=3), Request("long", "h", np.array([4], np.int32), 9, max_tokens=9, ignore_eos=True)])
    engine.collect().on_settled(lambda value, error: told.append((value, error)))
    engine.background()
    engine.background()
    assert told == [], "nothing has finished"
    engine.background()
    ((first, error),) = told
    assert error is None and {each.request for each in first.completions} == {"r0", "r1", "r2"}
    engine.collect(first.sequence).on_settled(lambda value, error: told.append((value, error)))
    engine.background()
    while engine.background():
        assert len(told) == 1
    assert [each.request for each in told[1][0].completions] == ["long"]
    with pytest.raises(ValueError, match="never collected"):
        engine.collect(99)


def test_has_every_method_of_its_api():
    for name in (
        "submit",
        "collect",
        "abort",
        "pause",
        "resume",
        "load_weights",
        "receive_weights",
        "slower",
        "progress",
    ):
        declared, there = getattr(EngineAPI, name), getattr(EngineService, name)
        now = (
            CompletionBatch if name == "collect" else there.__annotations__["return"]
        )  # `DeferredResult` is the service's own affair
        assert declared.__annotations__ == there.__annotations__ | {"return": now}
        assert hasattr(declared, "__lockstep_concurrent__") == hasattr(there, "__lockstep_concurrent__")
    assert hasattr(EngineService.progress, "__lockstep_concurrent__")


@dataclass
class Shard:
    name: str
    offset: int
    tensor: torch.Tensor
    constant: bool = False


def test_loads_weights_from_the_store(model, tmp_path):
    engine = service(model, reader="lockstep.weights.shared_memory_transport:StoreReader")
    parameters = dict(engine._engine.lm.named_parameters())
    plan = WeightPlan.of((name, parameter.shape, parameter.dtype) for name, parameter in parameters.items())
    store = WeightStore.create(tmp_path / "w", plan, writers=1)
    store.write_shards(0, 5, [Shard(name, 0, torch.full_like(each, 0.25)) for name, each in parameters.items()])
    store.commit(5)
    moves = current_beacon().progress_count
    engine.load_weights(str(store.folder), 5)
    assert current_beacon().progress_count - moves >= 2 * len(parameters), (
        "each tensor is read for the check and for the copy"
    )
    assert engine.progress().version == 5
    assert all(bool((parameter == 0.25).all()) for parameter in parameters.values())
    fresh = service(
        model, reader="lockstep.weights.shared_memory_transport:StoreReader", weights=str(store.folder), version=5
    )
    assert fresh.progress().version == 5
    with pytest.raises(ValueError, match="no weight reader"):
        service(model).load_weights(str(store.folder), 5)
    with pytest.raises(ValueError, match="reader: 'x' does not name a factory"):
        service(model, reader="x")


def test_collect_raises_a_failure(model):
    engine = service(model)
    with torch.no_grad():
        engine._engine.lm.get_input_embeddings().weight.fill_(torch.nan)
    engine.submit(ask(2))
    told = []
    engine.collect().on_settled(lambda value, error: told.append(error))
    assert engine.background() is False
    assert isinstance(told[0], BadLogits)
    for _ in range(2):
        with pytest.raises(BadLogits, match="'r0'"):
            taken(engine)
    engine.abort()
    assert {each.request for each in taken(engine).completions} == {"r0", "r1"}


def test_renew_answers_open_collect_calls(model):
    engine, told = service(model), []
    engine.submit(ask(2))
    engine.collect().on_settled(lambda value, error: told.append((value, error)))
    engine.background()
    engine.renew()
    assert told == [(CompletionBatch.of(0, []), None)], "the call does not stay open forever"
    engine.submit(ask(2))  # the same ids: the engine knows of none any more
    while engine.background():
        pass
    assert taken(engine).sequence == 2 and len(told) == 1
