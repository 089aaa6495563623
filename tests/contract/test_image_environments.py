"""Conversations of a real engine with environments that answer with images: every token, place and log-probability."""

from pathlib import Path

import numpy as np
import pytest
import torch

from lockstep.cluster.protocol import WorkerSpec
from lockstep.config.data import DatasetConfig
from lockstep.config.model import ModelConfig
from lockstep.config.rollout import BuiltinEngineConfig, EnvironmentConfig, SamplingConfig
from lockstep.data.images.observation_images import ObservationImages
from lockstep.data.samples import Completion, Prompt
from lockstep.data.turn_tokenizer import TurnTokenizer
from lockstep.models.vision.row_images import row_images
from lockstep.models.vision.tiny_families import VISION_FAMILIES
from lockstep.rollout.client.multi_turn import MultiTurnClient
from lockstep.rollout.engine_protocol import ENGINE_SERVICE
from lockstep.rollout.environments.environment_pool import EnvironmentPool
from lockstep.rollout.environments.environment_protocol import EnvironmentFailed
from tests.contract.vision_prompts import VisionScene
from tests.contract.vision_samples import picture

HERE = Path(__file__).parent
FAST = ("qwen3_vl", "gemma3")
OTHERS = [pytest.param(family, marks=pytest.mark.slow) for family in VISION_FAMILIES if family not in FAST]


class ImageConversations:
    """A tiny model with an engine, and conversations of its prompts with an environment."""

    def __init__(self, scene: VisionScene, cluster, engine) -> None:
        self.scene, self.cluster, self.engine = scene, cluster, engine

    def prompts(self) -> list[Prompt]:
        """One with an image, one without."""
        made = [self.scene.prompt("ab*cd?", picture(30, 30, 1)), self.scene.prompt("ab?")]
        return [Prompt(f"0:{n}", n, each.tokens, "", images=list(each.images)) for n, each in enumerate(made)]

    def sample(self, name: str, n: int, most: int = 8, **settings) -> dict[str, Completion]:
        config = EnvironmentConfig(path=f"image_environments.py:{name}", max_images=most, **settings)
        pool = EnvironmentPool(self.cluster, config, HERE)
        pool.start()
        try:
            images = ObservationImages(self.scene.processor, self.scene.store, DatasetConfig(path="x"), most)
            turns = TurnTokenizer(self.scene.tokenizer, DatasetConfig(path="x"), images=images)
            sampling = SamplingConfig(max_tokens=1500, stop=tuple("abcdefgh"))
            client = MultiTurnClient([self.engine], sampling, 3, pool=pool, turns=turns)
            found = client.sample(self.prompts(), sampling, "talk", n)
        finally:
            pool.close()
        return {f"{number // n}/{number % n}": each for number, each in enumerate(found)}

    def check(self, completion: Completion, prompt: Prompt) -> None:
        """Compares the engine's log-probabilities with one forward of transformers over the whole conversation."""
        lm, after = self.scene.load(), prompt.tokens.size
        placed = [*prompt.images, *(image.moved(after) for image in completion.images)]
        tokens = np.concatenate([prompt.tokens, completion.tokens]).astype(np.int64)
        types = torch.zeros(1, tokens.size, dtype=torch.int64)
        for image in placed:
            types[0, torch.from_numpy(image.places.astype(np.int64))] = 1
        assert (tokens == lm.config.image_token_id).sum() == int(types.sum()), "the policy wrote the placeholder"
        accepted = lm.forward.__wrapped__.__code__.co_varnames if hasattr(lm.forward, "__wrapped__") else ()
        names = [name for name in ("token_type_ids", "mm_token_type_ids") if name in accepted]
        inputs = dict.fromkeys(names, types)
        inputs |= row_images([self.scene.store.read(image.digest) for image in placed], placed, "cpu").inputs
        with torch.inference_mode():
            logits = lm(input_ids=torch.from_numpy(tokens)[None], **inputs).logits[0, after - 1 : -1]
        chosen = torch.log_softmax(logits.float(), -1).gather(-1, torch.from_numpy(tokens[after:])[:, None])[:, 0]
        np.testing.assert_allclose(completion.logprobs[completion.mask], chosen.numpy()[completion.mask], atol=1e-5)
        assert not completion.mask[np.concatenate([image.places for image in completion.images])].any()


@pytest.fixture(scope="module", params=[*FAST, *OTHERS])
def conversations(request, cluster, tmp_path_factory) -> ImageConversations:
    scene = VisionScene(tmp_path_factory.mktemp("talks"), request.param)
    model, settings = ModelConfig(path=str(scene.folder)), BuiltinEngineConfig(max_rows=16)
    arguments = {"model": model.model_dump(mode="json"), "engine": settings.model_dump(mode="json"), "threads": 1}
    arguments["images"] = str(scene.store.folder)
    (engine,) = cluster.start([WorkerSpec(f"engine-{request.param}", "rollout", 0, ENGINE_SERVICE, arguments)])
    return ImageConversations(scene, cluster, engine)


def test_the_engine_sees_all_images_so_far(conversations: ImageConversations) -> None:
    done, prompts = conversations.sample("Shows", 3, max_turn_tokens=6), conversations.prompts()
    counts = []
    for name, each in done.items():
        shown = [part for message in each.episode.messages for part in message["content"] if isinstance(part, dict)]
        assert [part["type"] for part in shown].count("image") == len(each.images)
        assert all("bytes" not in part for part in shown)
        counts.append(len(each.images))
        if conversations.scene.load().config.image_token_id not in each.tokens[each.mask]:
            conversations.check(each, prompts[int(name[0])])
    assert max(counts) >= 2


def test_a_bad_image_is_an_answer_with_an_error(conversations: ImageConversations, caplog) -> None:
    if conversations.scene.family != "qwen3_vl":
        pytest.skip("does not depend on the model")
    done = conversations.sample("Breaks", 4, max_turn_tokens=6)
    broken = [each for each in done.values() if each.episode.metrics.get("errors")]
    assert broken and "Breaks, sample talk.1/0:0/0, turn 0: image '0 of the observation' is trunc" in caplog.text
    for each in broken:
        answers = [message["content"] for message in each.episode.messages if message["role"] == "user"]
        assert any("error: image '0 of the observation' is" in str(answer) for answer in answers)
        assert each.images == []
    done = conversations.sample("Breaks", 4, max_turn_tokens=6, on_error="end")
    assert "error" in {each.episode.ended for each in done.values()}
    with pytest.raises(EnvironmentFailed, match=r"image_environments.py:Breaks: image '0 of the obs[^$]*turn 0"):
        conversations.sample("Breaks", 4, max_turn_tokens=6, on_error="stop")
    done = conversations.sample("Shows", 2, most=1, max_turn_tokens=6)
    assert all(len(each.images) <= 1 for each in done.values())
    with pytest.raises(EnvironmentFailed, match="is truncated or damaged"):
        conversations.sample("BreaksAtReset", 1, max_turn_tokens=6)


def test_a_lost_process_shows_the_same_images_again(conversations: ImageConversations) -> None:
    if conversations.scene.family != "qwen3_vl":
        pytest.skip("does not depend on the model")
    expected = conversations.sample("Shows", 2, max_turn_tokens=6)
    dying = conversations.sample("Dies", 2, max_turn_tokens=6, arguments={"mark": str(conversations.scene.home / "m")})
    assert (conversations.scene.home / "m").exists()
    for name, each in expected.items():
        assert [image.digest for image in dying[name].images] == [image.digest for image in each.images] or (
            dying[name].episode.metrics.get("errors")
        )
