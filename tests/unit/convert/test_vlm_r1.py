"""Scripts of VLM-R1."""

from pathlib import Path
from typing import Any

import pytest
from converted_fields import left, value, values

from lockstep.convert.conversion import ConversionFacts
from lockstep.convert.converter import ConvertedConfig, convert
from lockstep.convert.errors import NotConvertible

SOURCES = Path(__file__).parent / "sources"
BASE = "torchrun --nproc_per_node 2 grpo_jsonl.py --model_name_or_path m --max_steps 9 --num_generations 8 "
FILES = "--data_file_paths a.jsonl --image_folders images "


def converted(given: str, rows: int | None = None) -> ConvertedConfig:
    return convert("vlm-r1", [given], ConversionFacts(rows))


def test_its_script_for_boxes() -> None:
    found = converted(str(SOURCES / "vlm-r1_rec.sh"), rows=120_000)
    expected: dict[str, Any] = {
        "recipe": "grpo",
        "steps": 15_000,  # 2 epochs of 120,000 rows, 8 ranks x 8 x 2 completions of 8 per prompt
        "prompts_per_step": 16,
        "group_size": 8,
        "minibatch_size": 128,
        "loss.aggregation": "seq-mean-token-mean",
        "loss.kl.coefficient": 0.04,
        "rollout.sampling.max_tokens": 2048,
        "rollout.sampling.top_k": 50,
        "model.vision": None,
        "trainer.ranks": 8,
        "trainer.optimizer.lr": 1e-6,
    }
    assert values(found, *expected) == expected
    assert value(found, "reward.terms") == [
        {"kind": "iou", "boxes": "first", "coordinates": "resized", "extract": "answer", "name": "accuracy"},
        {"kind": "answer_format", "name": "format", "content": "box"},
    ]
    sources = value(found, "data.mixture")
    assert [(each["path"], each["images"]["folder"]) for each in sources] == [
        ("/data/refcoco_train.jsonl", "/data/coco"),
        ("/data/refcocog_train.jsonl", "/data/coco"),
    ]
    assert "JSON format" in value(found, "data.system")
    assert left(found) == set() and set(found.missing) == {"data.system"}


def test_an_adapter_with_frozen_vision() -> None:
    found = converted(str(SOURCES / "vlm-r1_jsonl_lora.sh"))
    expected: dict[str, Any] = {
        "data.path": "/data/vqa.jsonl",
        "data.images.folder": "/data/images",
        "model.vision.tower.train": False,
        "model.vision.projector.train": False,
        "model.vision.max_pixels": None,  # not of InternVL
        "model.adapter.r": 16,
        "model.adapter.target_modules": "all-linear",
        "model.max_length": None,
        "epochs": 2,
        "prompts_per_step": 2,
        "rollout.sampling.temperature": None,
        "steps": 250,
    }
    assert values(found, *expected) == expected
    kinds = [(each["kind"], each.get("name")) for each in value(found, "reward.terms")]
    assert kinds == [("math", "accuracy"), ("answer_format", "format"), ("function", None)]
    assert value(found, "reward.terms")[2] == {"kind": "function", "path": "FILE.py:lang", "signature": "vlm_r1"}
    assert left(found) == {"--val_split_ratio", "--max_anyres_num"}
    assert "lang" in found.missing["reward.terms"]


@pytest.mark.parametrize(
    ("options", "term", "missing"),
    [
        ("--reward_method map", "iou", False),
        ("--reward_method mcq", "text_answer", False),
        ("", "text_answer", True),
        ("--reward_method od_ap50", "iou", False),
        ("--reward_method odLength", "iou", True),
        ("--reward_method llm", "text_answer", True),
        ("--is_reward_customized_from_vlm_module true --task_type rec", "iou", False),
        ("--is_reward_customized_from_vlm_module true --task_type general", "text_answer", True),
    ],
)
def test_accuracy_depends_on_method_and_task(options: str, term: str, missing: bool) -> None:
    found = converted(f"{BASE}{FILES}{options}")
    assert [each["kind"] for each in value(found, "reward.terms")] == [term, "answer_format"]
    assert ("reward.terms" in found.missing) == missing


def test_the_older_script_counts_boxes_from_a_half_on() -> None:
    found = converted(BASE.replace("grpo_jsonl", "grpo_rec") + "--dataset_name data_config/rec.yaml --image_root /coco")
    assert value(found, "reward.terms")[0]["threshold"] == 0.5 and value(found, "data.images.folder") == "/coco"
    assert left(found) == {"--dataset_name"} and "data.path" in found.missing


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ("torchrun src/open_r1/sft.py --model_name_or_path m", "convert it with --from trl"),
        ("echo nothing", "starts no training of VLM-R1"),
    ],
)
def test_other_programs_are_refused(given: str, problem: str) -> None:
    with pytest.raises(NotConvertible, match=problem):
        converted(given)


def test_an_unknown_option_is_listed() -> None:
    found = converted(f"{BASE}{FILES}--freeze_visual true")
    assert [each.name for each in found.of_kind("unknown")] == ["--freeze_visual"]
