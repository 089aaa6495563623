"""Prompts with images in the vLLM engine: its log-probabilities, and what would be wrong without a word otherwise."""

import gc
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from lockstep.config.model import ModelConfig
from lockstep.config.rollout import BuiltinEngineConfig
from lockstep.config.rollout import VllmEngineConfig as Config
from lockstep.config.vision import VLLM_PACKAGES, VisionConfig
from lockstep.data.images.image_processor import with_pixel_limits
from lockstep.data.images.image_store import ImageStore
from lockstep.data.samples import PlacedImage
from lockstep.models.errors import ModelError
from lockstep.models.vision.model_parts import parameter_parts
from lockstep.models.vision.row_images import row_images
from lockstep.rollout.engine_protocol import Request
from lockstep.rollout.errors import BadRequest
from tests.contract.vision_samples import VisionPrompt, VisionSamples, picture

sys.path.insert(0, str(Path(__file__).parent))
from reference_model import publish

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(find_spec("vllm") is None, reason="needs the extra `vllm`: script/test --vllm"),
]
READER = "lockstep.weights.shared_memory_transport:StoreReader"
HAS_TORCHVISION = find_spec("torchvision") is not None
needs_torchvision = pytest.mark.skipif(not HAS_TORCHVISION, reason="vLLM imports torchvision for this model")
WIDE = {
    "hidden": 128,
    "heads": 4,
    "kv_heads": 2,
    "layers": 2,
    "vision_layers": 2,
    "vision_hidden": 64,
    "vision_ffn": 64,
}
"""Heads of 32, the smallest that vLLM's kernels know."""
CLOSE = 1e-5


class Images(VisionSamples):
    """A tiny model, its requests, and the store with their images."""

    def __init__(self, home, family):
        super().__init__(home / "model", family, **WIDE)
        self.share_embedding(self.reference)
        with torch.no_grad():  # images must matter: their features are as large as embeddings are after training
            for name, parameter in self.reference.named_parameters():
                if "visual" in name or "vision" in name or "connector" in name or "projector" in name:
                    parameter.mul_(2.0)
        self.reference.save_pretrained(self.folder)
        self.store = ImageStore(home / "images")
        self.prompts = {}

    def ask(self, text, images, count=3, tokens=24, name=None, **fields):
        prompt = self.prompt(text, images)
        for image in prompt.prepared:
            self.store.write(image)
        group = name or text
        self.prompts[group] = prompt
        tokens = {"max_tokens": tokens, "ignore_eos": True, **fields}
        array, placed = np.array(prompt.tokens, np.int32), tuple(prompt.placed)
        return [Request(f"{group}/{k}", group, array, seed=k, images=placed, **tokens) for k in range(count)]

    @torch.inference_mode()
    def error(self, requests, done):
        """The largest difference between a log-probability and that of transformers' own forward."""
        worst = 0.0
        for request in requests:
            got = done[request.id]
            expected = self.own_logprobs(self.prompts[request.group], got.tokens.tolist())
            worst = max(worst, float(np.abs(got.logprobs - expected.numpy()).max()))
        return worst

    def change(self, home, version, *parts):
        """Publishes other weights of these parts, or of all."""
        of = parameter_parts(self.reference)
        chosen = {
            name: each for name, each in self.reference.named_parameters() if of[id(each)] in (parts or of.values())
        }
        torch.manual_seed(version)
        with torch.no_grad():
            for parameter in chosen.values():
                parameter.add_(torch.randn_like(parameter) * 0.05)
            self.share_embedding(self.reference)
        return publish(SimpleNamespace(named_parameters=chosen.items), home / "store", version)


@pytest.fixture
def samples(tmp_path):
    return Images(tmp_path, "idefics3")


@pytest.fixture
def start():
    """Starts engines, and closes them after the test."""
    from lockstep.rollout.vllm.engine import VllmEngine

    made = []

    def engine(samples, images=True, extra=None, **fields):
        config = Config(max_num_seqs=16, cpu_kv_cache_gb=0.05, extra={"block_size": 32, **(extra or {})})
        store = str(samples.store.folder) if images else None
        model = ModelConfig(path=str(samples.folder), **fields)
        made.append(VllmEngine.from_config(model, config, reader=READER, threads=1, images=store))
        return made[-1]

    yield engine
    for each in made:
        each.close()


def run(engine, requests, steps=400):
    engine.submit(requests)
    done = {}
    for _ in range(steps):
        done.update((each.request, each) for each in engine.step())
        if len(done) == len(requests):
            return done
    raise TimeoutError(f"{len(done)} of {len(requests)} requests are finished")


def mixed(samples):
    """Groups with one image, two images and none."""
    wide, tall = picture(28, 20, 0), picture(14, 30, 1)
    groups = ("what?", [wide]), ("ab", [tall, wide]), ("abc", []), ("de", [wide])
    return [request for text, images in groups for request in samples.ask(text, images)]


def test_a_later_turn_may_bring_another_image(start, samples):
    """As an environment answers: the prompt of the next turn has the images so far, and an image after them."""
    engine = start(samples)
    first = samples.ask("what?", [picture(28, 20, 0)], count=2)
    run(engine, first)
    asked, letters = samples.prompts["what?"], samples.tokenizer.convert_tokens_to_ids(list("abcd"))
    shown = picture(14, 30, 1)
    prepared = samples.images.prepare(shown, samples.images.digest(shown.tobytes()))
    samples.store.write(prepared)
    reply, placed = samples.images.expand(f"c{samples.images.placeholder}d?", [prepared])
    tokens = [*asked.tokens, *letters, *reply.tolist()]
    placed = [*asked.placed, *(image.moved(len(tokens) - len(reply)) for image in placed)]
    both = [*asked.prepared, prepared]
    samples.prompts["later"] = VisionPrompt(tokens, placed, both, row_images(both, placed, "cpu").inputs)
    array = np.array(tokens, np.int32)
    second = [Request(f"later/{k}", "later", array, seed=k, max_tokens=16, images=tuple(placed)) for k in range(3)]
    before = engine.progress().prefix_cache_hits
    assert samples.error(second, run(engine, second)) < CLOSE
    assert engine.progress().prefix_cache_hits > before


def family_cases():
    """All families but Gemma 3, those without their packages skipped. Idefics3 needs none, and is quick enough for
    every run."""
    for family, packages in VLLM_PACKAGES.items():
        if family == "gemma3":
            continue  # refused, see below
        missing = " and ".join(name for name in packages if find_spec(name) is None)
        skip = pytest.mark.skipif(bool(missing), reason=f"vLLM imports {missing} for this model")
        yield pytest.param(family, marks=[skip, pytest.mark.slow] if packages else [])


@pytest.mark.parametrize("family", family_cases())
def test_greedy_completions_are_those_of_the_builtin_engine(start, family, tmp_path):
    from lockstep.rollout.builtin.engine import BuiltinEngine

    samples = Images(tmp_path, family)
    wide, tall = picture(28, 20, 0), picture(14, 30, 1)
    groups = ("what?", [wide]), ("ab", [tall, wide]), ("abc", [])
    requests = [each for text, images in groups for each in samples.ask(text, images, count=1, temperature=0.0)]
    model = ModelConfig(path=str(samples.folder))
    builtin = BuiltinEngine.from_config(model, BuiltinEngineConfig(max_rows=8), images=str(samples.store.folder))
    expected, found = run(builtin, requests), run(start(samples), requests)
    for request in requests:
        assert found[request.id].tokens.tolist() == expected[request.id].tokens.tolist()
        assert np.abs(found[request.id].logprobs - expected[request.id].logprobs).max() < CLOSE


@pytest.mark.parametrize("family", family_cases())
def test_log_probabilities_are_those_of_transformers_before_and_after_an_update(start, family, tmp_path):
    samples = Images(tmp_path, family)
    engine, requests = start(samples), mixed(samples)
    for version in (0, 1, 2):
        if version:
            engine.load_weights(samples.change(tmp_path, version), version)
        done = run(engine, requests)
        assert samples.error(requests, done) < CLOSE
        assert {token for each in done.values() for token in each.versions.tolist()} == {version}
        # A policy samples placeholders; they are text, for the engine as for the trainer.
        assert any(samples.image_token in each.tokens for each in done.values())


def test_a_group_shares_its_images_tensors(start, samples, monkeypatch):
    from lockstep.rollout.vllm import vllm_images

    made, core_item = [], vllm_images.core_item
    monkeypatch.setattr(vllm_images, "core_item", lambda *arguments: made.append(1) or core_item(*arguments))
    engine, requests = start(samples), samples.ask("what?", [picture(28, 20, 0)], count=8)
    run(engine, requests)
    assert len(made) == 1
    queries, hits = engine.progress().prefix_cache_queries, engine.progress().prefix_cache_hits
    assert queries == 8 * len(requests[0].prompt) and hits == 7 * (len(requests[0].prompt) // 32 * 32)


@pytest.fixture
def same_tokens(samples):
    """Two groups whose prompts differ only in their pictures."""
    one = samples.ask("what?", [picture(28, 20, 0)], name="one")
    other = samples.ask("what?", [picture(28, 20, 1)], name="other")
    assert one[0].prompt.tolist() == other[0].prompt.tolist() and len(one[0].prompt) > 32
    return one, other


def test_prompts_with_other_images_share_no_cache(start, samples, same_tokens):
    engine = start(samples)
    for requests in same_tokens:
        assert samples.error(requests, run(engine, requests)) < CLOSE


def test_without_content_hashes_prompts_get_other_prompts_images(start, samples, same_tokens, monkeypatch):
    """Shows why an image's key is its digest."""
    from lockstep.rollout.vllm.vllm_images import VllmImages

    monkeypatch.setattr(VllmImages, "_key", lambda self, image, loads: f"image-{loads}")
    engine = start(samples)
    one, other = same_tokens
    assert samples.error(one, run(engine, one)) < CLOSE
    assert samples.error(other, run(engine, other)) > 1e-3


def test_without_new_keys_and_a_reset_images_keep_their_old_embeddings(start, samples, tmp_path, monkeypatch):
    """Shows why images have other keys after a load, and the encoder cache is reset."""
    from lockstep.rollout.vllm.vllm_images import VllmImages

    monkeypatch.setattr(VllmImages, "_key", lambda self, image, loads: image.digest)
    monkeypatch.setattr(VllmImages, "forget", lambda self, core: None)
    engine, requests = start(samples), samples.ask("what?", [picture(28, 20, 0)])
    run(engine, requests)
    engine.load_weights(samples.change(tmp_path, 1), 1)
    assert samples.error(requests, run(engine, requests)) > 1e-3


def test_vllm_measures_with_the_largest_image_that_the_run_prepares(start, samples):
    from vllm.multimodal import MULTIMODAL_REGISTRY
    from vllm.multimodal.encoder_budget import MultiModalBudget

    engine, requests = start(samples, vision={"max_pixels": 256}), samples.ask("abc", [])
    budget = MultiModalBudget(engine.core.engine_core.vllm_config, MULTIMODAL_REGISTRY)
    limited = with_pixel_limits(samples.images, VisionConfig(max_pixels=256)).expansion((500, 500)).features
    assert limited < samples.images.expansion((500, 500)).features
    assert dict(budget.mm_max_toks_per_item) == {"image": limited}
    assert samples.error(requests, run(engine, requests)) < CLOSE


SMALL_CACHE = {"enable_chunked_prefill": True, "max_num_batched_tokens": 48}


def too_large(samples, name="large"):
    """A request whose image has more tokens than the encoder cache of `SMALL_CACHE`."""
    (request,) = samples.ask("what?", [picture(28, 20, 0)], count=1, name=name)
    prepared = samples.prompts[name].prepared[0]
    prompt = np.concatenate([np.repeat(request.prompt[:1], 60), request.prompt])
    placed = PlacedImage(prepared.digest, np.arange(2, 52, dtype=np.int32), "big.png")
    return Request(name, name, prompt, seed=0, temperature=0.0, max_tokens=4, images=(placed,))


def test_an_image_larger_than_the_encoder_cache_is_refused(start, samples):
    engine, fine = start(samples, extra=SMALL_CACHE), samples.ask("what?", [picture(28, 20, 0)], count=1)
    with pytest.raises(
        BadRequest,
        match=r"has an image of 50 tokens \(big.png\), but vLLM's encoder cache has room for 48: raise "
        r"rollout.engine.extra.max_num_batched_tokens, or lower model.vision.max_pixels",
    ):
        engine.submit([*fine, too_large(samples)])
    assert samples.error(fine, run(engine, fine)) < CLOSE


def test_without_the_refusal_the_core_waits_for_ever(start, samples, monkeypatch):
    from lockstep.rollout.vllm.vllm_images import VllmImages

    monkeypatch.setattr(VllmImages, "check", lambda self, request: None)
    monkeypatch.setattr(VllmImages, "_read", lambda self, request, image: self._store.read(image.digest))
    engine = start(samples, extra=SMALL_CACHE)
    with pytest.raises(TimeoutError, match="0 of 1 requests"):
        run(engine, [too_large(samples)], steps=60)


@pytest.mark.parametrize("waits", [True, False], ids=["lockstep", "without"])
def test_prompts_are_not_chunked_because_of_their_images(start, samples, monkeypatch, waits):
    """Prompts whose first block is in the prefix cache need few tokens of a step, and the room of whole images."""
    from lockstep.rollout.vllm.vllm_images import VllmImages

    if not waits:
        monkeypatch.setattr(VllmImages, "fit", lambda self, unstarted, request: True)
    known, others = (
        [request for seed in seeds for request in samples.ask("what?", [picture(28, 20, seed)], 1, 4, f"{seed}")]
        for seeds in (range(4), range(4, 10))
    )
    size, tokens = len(known[0].prompt), len(known[0].images[0].places)
    room = 5 * tokens - 1
    assert size > 32 and 4 * (size - 32) + size <= room
    engine = start(samples, extra={"max_num_batched_tokens": room}, max_length=size + 4)
    run(engine, known)
    run(engine, others)  # the encoder cache now has the images of these, the prefix cache has all prompts
    requests = [*known, *samples.ask("what?", [picture(28, 20, 99)], 1, 4, "new")]
    if waits:
        assert samples.error(requests, run(engine, requests)) < CLOSE
    else:
        with pytest.raises(RuntimeError, match="CPU Generator does not use offset"):
            run(engine, requests)


def with_argument(monkeypatch, **arguments):
    """Starts engines with other arguments for images than Lockstep's."""
    from lockstep.rollout.vllm import vllm_setup

    own = vllm_setup._image_arguments
    monkeypatch.setattr(vllm_setup, "_image_arguments", lambda *given: own(*given) | arguments)


@pytest.mark.parametrize("gigabytes", [0, 1], ids=["lockstep", "vllm"])
def test_the_core_keeps_no_pixels(start, samples, monkeypatch, gigabytes):
    """vLLM's own cache would keep them, for a front end that sends each image once."""
    with_argument(monkeypatch, mm_processor_cache_gb=gigabytes)
    engine = start(samples)
    run(engine, samples.ask("what?", [picture(28, 20, 0)]))
    run(engine, samples.ask("abc", []))  # vLLM's worker drops finished requests in the next step
    gc.collect()
    assert len(engine._images._items) == gigabytes


@needs_torchvision
@pytest.mark.slow
def test_without_the_argument_pixels_are_normalised_twice(start, tmp_path, monkeypatch):
    """Shows why vLLM must not normalise. Idefics3, for which no torchvision is needed, has no such step in vLLM."""
    with_argument(monkeypatch, mm_device_do_normalize=None)
    samples = Images(tmp_path, "qwen2_5_vl")
    requests = samples.ask("what?", [picture(28, 20, 0)])
    assert samples.error(requests, run(start(samples), requests)) > 1e-3


def test_images_that_cannot_be_read_are_refused(start, samples):
    engine, (request,) = start(samples), samples.ask("what?", [picture(28, 20, 0)], count=1)
    samples.store.path(request.images[0].digest).unlink()
    with pytest.raises(BadRequest, match=r"has an unusable image: image \w+: .* does not exist"):
        engine.submit([request])


def test_a_model_with_images_serves_text_alone(start, samples, tmp_path):
    """Its encoder is not loaded then; a version has the encoder's weights all the same."""
    engine, requests = start(samples, images=False), samples.ask("abc", [])
    with pytest.raises(BadRequest, match="has images, but the engine was started without a folder of prepared images"):
        engine.submit(samples.ask("what?", [picture(28, 20, 0)]))
    assert samples.error(requests, run(engine, requests)) < CLOSE
    engine.load_weights(samples.change(tmp_path, 1), 1)
    assert samples.error(requests, run(engine, requests)) < CLOSE


@pytest.mark.parametrize("part", ["tower", "projector", "language"])
def test_parts_that_are_not_trained_keep_their_weights(start, samples, tmp_path, part):
    frozen = {name: {"train": name == part} for name in ("tower", "projector", "language")}
    engine, requests = start(samples, vision=frozen), mixed(samples)
    before = run(engine, requests)
    for version in (1, 2):
        engine.load_weights(samples.change(tmp_path, version, part), version)
        done = run(engine, requests)
        assert samples.error(requests, done) < CLOSE
    assert samples.error(requests, before) > 1e-3


@needs_torchvision
@pytest.mark.slow
def test_gemma_3_is_refused_on_a_cpu_unless_it_gets_text_alone(start, tmp_path):
    """vLLM would compute its images as text there, with log-probabilities that are wrong by 0.05 and more."""
    samples = Images(tmp_path, "gemma3")
    with pytest.raises(ModelError, match=r"the tokens of its images attend to each other.*use rollout.engine.kind="):
        start(samples)
    engine, requests = start(samples, images=False), samples.ask("abc", [])
    assert samples.error(requests, run(engine, requests)) < CLOSE
    engine.load_weights(samples.change(tmp_path, 1), 1)
    assert samples.error(requests, run(engine, requests)) < CLOSE


@pytest.mark.skipif(HAS_TORCHVISION, reason="torchvision is installed")
def test_a_missing_torchvision_is_named_at_the_start(start, tmp_path):
    with pytest.raises(ModelError, match=r"vLLM on host \S+ .*torchvision is missing there: pip install torchvision"):
        start(Images(tmp_path, "qwen2_5_vl"))
