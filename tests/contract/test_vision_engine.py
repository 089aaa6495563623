"""The builtin engine generates from images what transformers itself generates, for every family of models."""

import re
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from lockstep.data.images.image_store import ImageStore, ImageUnavailable
from lockstep.data.samples import Completion, PlacedImage
from lockstep.models.tiny_model import make_tiny
from lockstep.models.vision.model_parts import parameter_parts
from lockstep.models.vision.tiny_families import VISION_FAMILIES
from lockstep.rollout.builtin import BuiltinEngine, runner_choice
from lockstep.rollout.builtin.fused_forward import FusedForward, NotFusible
from lockstep.rollout.builtin.model_forward import ModelForward, use_plain_attention
from lockstep.rollout.builtin.model_runner import CachedRunner
from lockstep.rollout.builtin.plain_runner import PlainRunner
from lockstep.rollout.builtin.prompt_images import ModelImages
from lockstep.rollout.engine_protocol import Request, RequestGroup
from lockstep.rollout.engine_service import EngineService
from lockstep.rollout.errors import BadRequest, WeightsMismatch
from tests.contract.vision_prompts import PicturePrompt, VisionScene
from tests.contract.vision_samples import picture

torch.set_num_threads(1)  # tiny matrices: more threads only wait for each other
FAST = ("qwen3_vl", "gemma3")
"""Positions of three axes with DeepStack; attention in both directions and windows."""
OTHERS = [pytest.param(family, marks=pytest.mark.slow) for family in VISION_FAMILIES if family not in FAST]


@pytest.fixture(scope="module", params=[*FAST, *OTHERS])
def scene(request, tmp_path_factory) -> VisionScene:
    return VisionScene(tmp_path_factory.mktemp("vision"), request.param)


@pytest.fixture(scope="module")
def own(scene):
    return scene.load()


def engine(scene, **options) -> BuiltinEngine:
    return BuiltinEngine(scene.load(), scene.tokenizer, **{"images": scene.store, **options})


def mixed_prompts(scene) -> list[PicturePrompt]:
    return [
        scene.prompt("ab*cd?", picture(30, 30, 1)),
        scene.prompt("abc hg?"),
        scene.prompt("a*b*c?", picture(60, 20, 2), picture(30, 30, 3)),
        scene.prompt("*hh*? abc", picture(20, 60, 4), picture(60, 60, 5)),
        scene.prompt("*?", picture(30, 30, 6)),
    ]


def run(engine, requests: list[Request], limit: int = 2000) -> dict[str, Completion]:
    engine.submit(requests)
    done: dict[str, Completion] = {}
    for _ in range(limit):
        done |= {completion.request: completion for completion in engine.step()}
        if len(done) == len(requests):
            return done
    raise AssertionError("the engine does not finish")


def assert_same(one: dict[str, Completion], other: dict[str, Completion]) -> None:
    assert one.keys() == other.keys()
    for name, completion in one.items():
        assert completion.tokens.tolist() == other[name].tokens.tolist(), name
        np.testing.assert_allclose(completion.logprobs, other[name].logprobs, atol=1e-5)


def assert_transformers_own(scene, own, prompts, done) -> None:
    for group, prompt in enumerate(prompts):
        mine = [done[name] for name in done if name.startswith(f"{group}/")]
        assert mine[0].tokens.tolist() == scene.own_greedy(own, prompt, len(mine[0].tokens))
        for completion in mine:
            expected = scene.own_logprobs(own, prompt, completion.tokens)
            np.testing.assert_allclose(completion.logprobs, expected, atol=1e-5)


def test_prompts_with_and_without_images_give_what_transformers_gives(scene, own):
    prompts = mixed_prompts(scene)
    made = engine(scene)
    assert isinstance(made._runner, CachedRunner)
    assert isinstance(made._runner.forward, ModelForward if scene.family == "gemma3" else FusedForward)
    done = run(made, [each for group, prompt in enumerate(prompts) for each in prompt.requests(str(group), 3)])
    assert_transformers_own(scene, own, prompts, done)
    # Other images give other log-probabilities of the same completion, so the comparison can fail.
    first = done["0/1"]
    other = scene.own_logprobs(own, scene.prompt("ab*cd?", picture(30, 30, 9)), first.tokens)
    assert abs(other - first.logprobs).max() > 1e-2


def test_few_rows_and_a_budget_change_nothing(scene):
    prompts = mixed_prompts(scene)
    requests = [each for group, prompt in enumerate(prompts) for each in prompt.requests(str(group), 3)]
    longest = max(len(prompt.tokens) for prompt in prompts) + 12
    assert_same(run(engine(scene), requests), run(engine(scene, max_rows=4, cache_tokens=5 * longest), requests))


def test_the_tower_runs_once_per_prompt(scene):
    made, seen = engine(scene), []
    features = made._runner.images.features
    made._runner.images.features = lambda images, prepared: seen.extend(images) or features(images, prepared)
    prompts = mixed_prompts(scene)
    run(made, [each for group, prompt in enumerate(prompts) for each in prompt.requests(str(group), 4)])
    assert len(seen) == sum(len(prompt.images) for prompt in prompts)


def test_generated_placeholder_tokens_are_text(scene, own):
    """The reference has the images in one call and the completion in another, so that it cannot confuse them."""
    prompt, placeholder = scene.prompt("a*b?", picture(30, 30, 1)), own.config.image_token_id
    made = engine(scene)
    done = run(made, prompt.requests("0", 24, keep=True))
    shown = [each for each in done.values() if placeholder in each.tokens[:-1]]
    assert shown, "no completion has the placeholder token: use another seed"
    for each in shown[:4]:
        np.testing.assert_allclose(each.logprobs, scene.own_logprobs(own, prompt, each.tokens), atol=1e-5)
    # A next turn has the completion, with the placeholder, in its prompt.
    longer = np.concatenate([prompt.tokens, shown[0].tokens, prompt.tokens[-2:]])
    (answer,) = run(made, replace(prompt, tokens=longer).requests("1")).values()
    whole = np.concatenate([longer[len(prompt.tokens) :], answer.tokens])
    expected = scene.own_logprobs(own, prompt, whole)[-len(answer.tokens) :]
    np.testing.assert_allclose(answer.logprobs, expected, atol=1e-5)


def test_equal_tokens_with_other_images_share_no_keys(scene, own):
    """Also not through the prefix cache, nor between groups that run together."""
    made = engine(scene)
    one, other = (scene.prompt("ab ab ab ab ab ab ab*cd?", picture(30, 30, seed)) for seed in (1, 2))
    assert one.tokens.tolist() == other.tokens.tolist()
    done = run(made, [*one.requests("0", 2, keep=True), *other.requests("1", 2)])
    assert_transformers_own(scene, own, [one, other], done)
    before = made.progress().prefix_cache_hits
    done |= run(made, other.requests("1", 2))
    assert_transformers_own(scene, own, [one, other], done)
    first = int(one.images[0].places[0])
    assert made.progress().prefix_cache_hits - before == (first if first >= 16 else 0)
    done |= run(made, one.requests("0", 2))
    assert_transformers_own(scene, own, [one, other], done)
    assert made.progress().prefix_cache_hits - before >= len(one.tokens) - 1


def test_a_later_turn_may_bring_another_image(scene):
    if scene.family == "llava_onevision":
        pytest.skip("prepares an image otherwise if its prompt has several, so a turn cannot add one")
    made = engine(scene)
    first = scene.prompt("a*b?", picture(30, 30, 1))
    (turn,) = run(made, first.requests("first", keep=True, ignore_eos=True)).values()
    reply = scene.prompt("c*d?", picture(60, 20, 2))
    start = len(first.tokens) + len(turn.tokens)
    second = replace(
        first,
        tokens=np.concatenate([first.tokens, turn.tokens, reply.tokens]),
        images=(*first.images, *(image.moved(start) for image in reply.images)),
    )
    continued = run(made, second.requests("second", 3))
    assert made.progress().prefix_cache_hits >= len(first.tokens) + len(turn.tokens) - 1
    assert_same(continued, run(engine(scene, prefix_cache=0.0), second.requests("second", 3)))


def test_the_plain_path_computes_the_same(scene):
    prompts = mixed_prompts(scene)
    requests = [each for group, prompt in enumerate(prompts) for each in prompt.requests(str(group), 2, max_tokens=4)]
    made = engine(scene)
    expected = run(made, requests)
    use_plain_attention(made.lm)
    made._runner = PlainRunner(made.lm, made.device, images=ModelImages(made.lm, scene.store))
    assert_same(run(made, requests), expected)


def test_the_models_own_forward_computes_the_same(scene, monkeypatch):
    if scene.family == "gemma3":
        pytest.skip("has no fused forward")
    prompts = mixed_prompts(scene)
    requests = [each for group, prompt in enumerate(prompts) for each in prompt.requests(str(group), 2)]
    expected = run(engine(scene), requests)

    def refuse(lm):
        raise NotFusible("refused by the test")

    monkeypatch.setattr(runner_choice, "FusedForward", refuse)
    made = engine(scene)
    assert isinstance(made._runner.forward, ModelForward) and "refused by the test" in made.slower
    assert_same(run(made, requests), expected)


def test_a_version_with_half_of_a_part_is_refused(scene, tmp_path):
    made = engine(scene, reader=read_file)
    parts = parameter_parts(made.lm)
    tower = {name: tensor for name, tensor in made.lm.named_parameters() if parts[id(tensor)] == "tower"}
    name, *rest = sorted(tower)
    save_file({each: tower[each].contiguous() for each in rest}, tmp_path / "weights")
    with pytest.raises(WeightsMismatch, match=re.escape(name)) as caught:
        made.load_weights(tmp_path / "weights", 1)
    assert caught.value.missing == (name,) and made.version == 0


def test_decode_steps_as_graphs_compute_the_same(scene):
    """With the buffers and shapes of CUDA graphs, and the step itself in place of a captured one."""
    if scene.family == "gemma3":
        pytest.skip("has no fused forward")
    made = engine(scene)
    requests = [each for group, prompt in enumerate(mixed_prompts(scene)) for each in prompt.requests(str(group), 2)]
    expected = run(made, requests)
    made._runner._capture = lambda step: step
    made._runner._graphs = made._runner._new_graphs()
    assert made._runner._graphs is not None
    assert_same(run(made, requests), expected)
    assert made._runner._graphs._steps


@contextmanager
def read_file(source, version):
    yield load_file(source)


@pytest.mark.parametrize("part", ["tower", "projector", "language", "everything"])
def test_new_weights_give_what_a_new_engine_gives(scene, part, tmp_path):
    """A version has the parts that are trained. Features of older weights are not used again."""
    made, prompts = engine(scene, reader=read_file), mixed_prompts(scene)
    requests = [each for group, prompt in enumerate(prompts) for each in prompt.requests(str(group), 2, keep=True)]
    before = run(made, requests)
    changed = scene.load()
    parts, random = parameter_parts(changed), torch.Generator().manual_seed(5)
    arriving = {}
    with torch.no_grad():
        for name, parameter in changed.named_parameters():
            if part in (parts[id(parameter)], "everything"):
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=random) * parameter.std().nan_to_num(1))
                arriving[name] = parameter.detach().contiguous()
    assert arriving
    save_file(arriving, tmp_path / "weights")
    made.load_weights(tmp_path / "weights", 1)
    after = run(made, requests)
    assert_same(after, run(BuiltinEngine(changed, scene.tokenizer, images=scene.store), requests))
    with_image = [name for name in before if name.startswith(("0/", "2/"))]
    assert any(abs(before[name].logprobs - after[name].logprobs).max() > 1e-3 for name in with_image)


def test_the_service_reads_the_folder_of_images(scene):
    service = EngineService({"path": str(scene.folder)}, {"max_rows": 4}, threads=1, images=str(scene.store.folder))
    requests = scene.prompt("ab*cd?", picture(30, 30, 1)).requests("0", 3)
    service.submit(RequestGroup.all_of(requests))
    while service.background():
        pass
    batches = []
    service.collect().on_settled(lambda batch, error: batches.append(batch))
    done = {completion.request: completion for completion in batches[0].completions}
    assert_same(done, run(engine(scene), requests))
    service.close()


def test_an_image_that_is_lost_after_its_request_fails_the_next_collect(scene, tmp_path):
    prompt, store = scene.prompt("ab*cd?", picture(30, 30, 1)), ImageStore(tmp_path / "images")
    store.write(scene.store.read(prompt.images[0].digest))
    service = EngineService({"path": str(scene.folder)}, {"max_rows": 4}, threads=1, images=str(store.folder))
    service.submit(RequestGroup.all_of(prompt.requests("0", 2)))
    store.path(prompt.images[0].digest).unlink()
    assert not service.background()
    with pytest.raises(ImageUnavailable, match="does not exist"):
        service.collect()
    service.abort()
    text = scene.prompt("abc hg?").requests("1")
    service.submit(RequestGroup.all_of(text))
    while service.background():
        pass
    batches = []
    service.collect().on_settled(lambda batch, error: batches.append(batch))
    done = {completion.request: completion for completion in batches[0].completions}
    assert_same({"1/0": done["1/0"]}, run(engine(scene), text))


def test_images_that_the_engine_cannot_have_are_refused(scene, tmp_path):
    prompt = scene.prompt("ab*cd?", picture(30, 30, 1))
    with pytest.raises(BadRequest, match="without the folder of prepared images"):
        engine(scene, images=None).submit(prompt.requests("0"))
    with pytest.raises(BadRequest, match="does not exist"):
        engine(scene, images=ImageStore(tmp_path / "empty")).submit(prompt.requests("0"))


def test_a_text_model_refuses_images(tmp_path):
    folder = make_tiny(tmp_path / "text", hidden=32, layers=1, heads=2, kv_heads=1, ffn=48, max_length=64)
    service = EngineService({"path": str(folder)}, {"max_rows": 2}, threads=1, images=str(tmp_path / "images"))
    image = PlacedImage("0123456789abcdef", np.array([1, 2], np.int32))
    pictured = PicturePrompt("", [], np.arange(1, 9, dtype=np.int32), (image,))
    service.submit(RequestGroup.all_of(replace(pictured, images=()).requests("0")))
    with pytest.raises(BadRequest, match="Qwen2ForCausalLM has no vision tower"):
        service.submit(RequestGroup.all_of(pictured.requests("1")))
