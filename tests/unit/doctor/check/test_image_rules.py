"""What the images of a run need, from figures of the data and the host."""

from dataclasses import replace
from typing import Any

from lockstep.config.loader import check_config
from lockstep.doctor.check.rules.image_rules import ImageDemand, judge_images
from lockstep.doctor.output.findings import Finding

DEMAND = ImageDemand(
    family="qwen2_5_vl", samples=1000, images=1500, most_images=3, most_tokens=4000, largest=1296,
    largest_size=(1008, 1008), mean_tokens=1000.0, token_bytes=18816, tower=669_000_000, disk_free=100 << 30,
    shm_free=8 << 30, shm_other=1 << 30,
)  # fmt: skip
"""1296 tokens of Qwen2.5-VL are 5184 patches of 1176 float32."""


def run(**changes: Any) -> Any:
    base = {
        "recipe": "grpo", "name": "x", "steps": 1, "model": {"path": "m"}, "data": {"path": "d.jsonl"},
        "reward": {"terms": [{"kind": "exact_match"}]},
    }  # fmt: skip
    return check_config(base | changes, "x")


def vllm(**fields: Any) -> Any:
    return run(rollout={"engine": {"kind": "vllm", **fields}})


def judge(config: Any, demand: ImageDemand = DEMAND, **environ: str) -> dict[str, Finding]:
    return {each.id: each for each in judge_images(config, demand, environ)}


def test_the_figures_of_the_data_are_shown() -> None:
    seen = judge(run())["images"].seen
    assert "1,500 images in 1,000 samples" in seen and "at most 3 in one with 4,000 tokens together" in seen
    assert "1008 x 1008 pixels) has 1,296 tokens" in seen and "669.0 million" in seen


def test_prepared_images_need_room_on_the_disk() -> None:
    assert judge(run())["images-disk"].severity == "ok"
    needed = 1500 * 1000 * 18816
    all_kept = run(model={"path": "m", "vision": {"store_gb": 1000}})
    found = judge(all_kept, replace(DEMAND, disk_free=needed - 1))["images-disk"]
    assert found.severity == "error" and "26.3 GiB" in found.seen and "model.vision.max_pixels" in found.fix
    assert judge(run(), replace(DEMAND, disk_free=None))["images-disk"].severity == "unchecked"
    small = run(model={"path": "m", "vision": {"store_gb": (needed - 1) / 1e9}})
    bounded = judge(small, replace(DEMAND, disk_free=needed - 1))["images-disk"]
    assert bounded.severity == "ok" and "model.vision.store_gb" in bounded.seen


def test_only_vllm_needs_further_packages() -> None:
    without = replace(DEMAND, missing=("torchvision",))
    assert "images-packages" not in judge(run(), without) | judge(vllm())
    found = judge(vllm(), without)["images-packages"]
    assert found.severity == "error" and found.seen == "torchvision is not installed here"
    assert "qwen2_5_vl" in found.why and "pip install torchvision" in found.fix
    assert judge(vllm(), replace(without, family="new"))["images-packages"].severity == "warning"
    several = judge(vllm(), replace(DEMAND, family="smolvlm", missing=("torchvision", "num2words")))["images-packages"]
    assert "torchvision and num2words are not" in several.seen and "torchvision num2words" in several.fix
    warning = judge(run(rollout={"engine": {"kind": "vllm"}}, cluster={"kind": "ray"}), without)["images-packages"]
    assert warning.severity == "warning" and "hosts of engines" in warning.seen


def test_vllm_computes_image_tokens_that_see_each_other_on_gpus_only() -> None:
    gemma = replace(DEMAND, family="gemma3", on_cpu=True)
    assert judge(vllm(), gemma)["images-attention"].severity == "error"
    assert "images-attention" not in judge(run(), gemma) | judge(vllm(), replace(gemma, on_cpu=False))
    assert "images-attention" not in judge(vllm(), replace(gemma, family="qwen3_vl"))


def test_only_tensor_parallel_engines_need_shared_memory() -> None:
    assert "images-shm" not in judge(run())
    small = replace(DEMAND, shm_free=64 << 20, shm_other=0)
    assert judge(vllm(), small)["images-shm"].severity == "ok"
    found = judge(vllm(tensor_parallel_size=2, count=2), small)["images-shm"]
    assert found.severity == "error" and "320 MiB of /dev/shm" in found.seen and "64 MiB are free" in found.seen
    assert "--shm-size" in found.fix and "320 MiB at least" in found.fix
    assert judge(vllm(tensor_parallel_size=2, count=2))["images-shm"].severity == "ok"
    assert judge(vllm(tensor_parallel_size=2), replace(small, shm_free=100 << 20))["images-shm"].severity == "error"
    fewer = judge(vllm(tensor_parallel_size=2), replace(small, shm_free=100 << 20), VLLM_MQ_MAX_CHUNK_BYTES_MB="8")
    assert fewer["images-shm"].severity == "ok"


def test_a_step_of_vllm_must_hold_the_largest_image_if_none_is_divided() -> None:
    whole = {"max_num_batched_tokens": 1024, "disable_chunked_mm_input": True}
    found = judge(vllm(extra=whole))["images-batch"]
    assert found.severity == "error" and "1,296 tokens" in found.seen and "max_num_batched_tokens=1296" in found.fix
    assert "images-batch" not in judge(vllm(extra={"max_num_batched_tokens": 1024}))
    assert "images-batch" not in judge(vllm(extra=whole | {"max_num_batched_tokens": 1296}))
