"""Every family of models loads new weights correctly, or is refused at the start.

vLLM uses the tensors of some unchanged and rearranges those of others; some are published under a checkpoint's names.
"""

import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
import model_families as mf
import reference_model as reference
from stream_endpoints import Feeder
from test_vllm import CONTEXT, ask, run, start  # noqa: F401 - a fixture

from lockstep.models.errors import ModelError

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(find_spec("vllm") is None, reason="needs the extra `vllm`: script/test --vllm"),
]
CLOSE = 1e-3
"""For Bloom, vLLM and transformers differ by 4e-4, for Gemma 2 by 2e-4, for others by 2e-6; with any old weight by far
more."""
WIDE = {name: size for name, size in (mf.USUAL | mf.VLLM_SIZES).items() if name in mf.USUAL}
VARIANTS = {
    "llama-tied": ("Llama", WIDE | {"tie_word_embeddings": True, "attention_bias": True}),
    # The output layer is tied to the embedding.
    "cohere": ("Cohere", WIDE),
    "cohere2": ("Cohere2", WIDE),
    # The checkpoint interleaves query, key and value per head; vLLM stores them one after the other.
    "falcon": ("Falcon", WIDE | {"multi_query": False}),
    "falcon-new": ("Falcon", WIDE | {"num_kv_heads": 2, "new_decoder_architecture": True}),
}
"""Further models, whose weights vLLM keeps in other ways."""
KNOWN = ("llama", "llama-tied", "mistral", "qwen2", "qwen3")
"""Models whose layers are loaded directly."""
QUICK = ("llama-tied", "qwen2", "qwen3", "bloom", "mixtral", "gpt-oss")
"""Layers that are loaded directly, with tied and with own output layers and with and without biases and norms of their
own; fused ones, and experts. The others, which repeat one of these, are run by `script/test --vllm`."""
FAMILIES = [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in (*mf.FAMILIES, *VARIANTS)]


@pytest.fixture(scope="module")
def elsewhere():
    """Calls functions in another process."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        yield lambda function, *arguments: pool.submit(function, *arguments).result(timeout=120)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_loads_new_weights_correctly(start, elsewhere, family, tmp_path, monkeypatch):  # noqa: F811
    from lockstep.rollout.vllm import weight_transfer

    carried, apply_tensor_moves = [], weight_transfer.apply_tensor_moves

    def carry(tensor_moves, tensors):
        carried.append(len(tensor_moves))
        apply_tensor_moves(tensor_moves, tensors)

    monkeypatch.setattr(weight_transfer, "apply_tensor_moves", carry)
    name, fields = VARIANTS.get(family) or mf.for_vllm(family)
    elsewhere(reference.make_versions, tmp_path / "m", name, fields)
    if family in mf.FAMILIES and mf.documented()[family][4] == "refused":
        with pytest.raises(ModelError, match=r"vLLM on host \S+ .*rollout\.engine\.kind=builtin"):
            start(tmp_path / "m", max_length=CONTEXT)
        return
    engine, requests = start(tmp_path / "m", max_length=CONTEXT), ask(count=2, length=40)
    old = tmp_path / "m"
    assert elsewhere(reference.error_of_folder, old, requests, run(engine, requests)) < CLOSE
    for version in (4, 5):  # the second time the layers have been packed already
        new = tmp_path / "m" / str(version)
        elsewhere(reference.publish_folder, new, tmp_path / "store", version)
        engine.load_weights(tmp_path / "store", version)
        done = run(engine, requests)
        assert elsewhere(reference.error_of_folder, new, requests, done) < CLOSE
        assert elsewhere(reference.error_of_folder, old, requests, done) > 1e-2
        old = new
    assert bool(carried) == (family in KNOWN)


@pytest.mark.parametrize("family", ["mixtral", pytest.param("gpt-oss", marks=pytest.mark.slow)])
def test_experts_arrive_in_a_stream(start, family, tmp_path):  # noqa: F811
    folder = mf.make_model(tmp_path / "m", *mf.for_vllm(family))
    engine, requests, feeder = start(folder, max_length=CONTEXT), ask(count=2, length=40), Feeder(tmp_path)
    new = reference.changed(folder)
    for version in (1, 2):
        with torch.no_grad():
            for parameter in new.parameters():
                parameter.mul_(1.1)
        feeder.give(engine, new, version)
        assert reference.error(new, requests, run(engine, requests)) < CLOSE


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mixtral", "gpt-oss", "deepseek-v3"])
def test_two_tensor_parallel_workers_load_their_own_experts(start, family, tmp_path):  # noqa: F811
    folder = mf.make_model(tmp_path / "m", *mf.for_vllm(family))
    engine, requests = start(folder, max_length=CONTEXT, tensor_parallel_size=2), ask(count=2, length=40)
    new = reference.changed(folder)
    engine.load_weights(reference.publish(new, tmp_path / "store", 4), 4)
    assert reference.error(new, requests, run(engine, requests)) < CLOSE


class NoDirectWrites(nullcontext):
    def __enter__(self):
        return self

    def finish(self):
        pass


@pytest.mark.parametrize("family", ["mixtral", pytest.param("gpt-oss", marks=pytest.mark.slow)])
def test_without_the_corrections_experts_are_wrong(start, family, tmp_path, monkeypatch):  # noqa: F811
    """Shows why the corrections are needed. If this test fails, vLLM has fixed the error, and the correction can go."""
    monkeypatch.setattr("lockstep.rollout.vllm.weight_transfer.drop_expert_kernels", lambda model: None)
    monkeypatch.setattr("lockstep.rollout.vllm.weight_transfer.DirectWrites", NoDirectWrites)
    folder = mf.make_model(tmp_path / "m", *mf.for_vllm(family))
    engine, requests, new = start(folder, max_length=CONTEXT), ask(count=2, length=40), reference.changed(folder)
    engine.load_weights(reference.publish(new, tmp_path / "store", 4), 4)
    assert reference.error(new, requests, run(engine, requests)) > 1e-2
