"""Rules of VLM-R1: what its options mean together. Its trainer comes from TRL's of 2025, whose rules it shares; the
table `tables/vlm-r1.yaml` has its own options.

Read from its scripts `grpo_jsonl.py`, `grpo_rec.py` and `trainer/grpo_trainer.py`.
"""

from collections.abc import Mapping
from typing import Any

from lockstep.convert import shared_fields as fields
from lockstep.convert.conversion import Conversion
from lockstep.convert.trl import trl_conversion as trl
from lockstep.convert.trl.trl_rollouts import set_trl_rollouts

INSTRUCTION = (
    "First output the thinking process in <think> </think> tags and then output the final answer in <answer> </answer> "
    "tags."
)
"""What VLM-R1 writes after every question."""
JSON_INSTRUCTION = f"{INSTRUCTION} Output the final answer in JSON format."
_METHODS: Mapping[str, Mapping[str, Any]] = {
    "math": {"kind": "math"},
    "mcq": {"kind": "text_answer"},
    "yes_no": {"kind": "text_answer"},
    "map": {"kind": "iou", "boxes": "map", "labels": True, "thresholds": [0.5], "extract": "whole"},
    "od_ap": {"kind": "iou", "boxes": "map", "labels": True, "extract": "answer"},
    "od_ap50": {"kind": "iou", "boxes": "map", "labels": True, "thresholds": [0.5], "extract": "answer"},
}
"""The terms of `accu_reward_method`; others have no counterpart."""
_NEAREST: Mapping[str, tuple[Mapping[str, Any], str]] = {
    "default": (
        {"kind": "text_answer", "compare": "ratio"},
        "default compares mathematical expressions and numbers for equality first, and letters of choices; the term "
        "compares all texts by edit distance, as default does with the rest (kind: math is for answers that are "
        "expressions, compare: normalized for choices)",
    ),
    "llm": ({"kind": "text_answer"}, "llm asks a language model, as a term of kind judge does"),
    "odLength": (dict(_METHODS["od_ap"]), "odLength is less than od_ap where there are more boxes than expected"),
    "weighted_sum": ({"kind": "iou", "labels": True}, "weighted_sum adds up place, label and completeness of boxes"),
    "all_match": ({"kind": "text_answer", "compare": "list"}, "all_match is 1 only where all items are right"),
}
"""The nearest terms of methods without a counterpart, and how these differ."""


def convert_vlm_r1(conv: Conversion) -> str:
    """Sets the fields of a training of VLM-R1; returns the recipe."""
    fields.set_name(conv, "output_dir", "run_name", "vlm-r1")
    _forget(conv, "max_prompt_length", "VLM-R1 sets it to none itself; longer prompts are dropped here")
    _forget(conv, "temperature", "VLM-R1 always samples at temperature 1")
    _forget(conv, "lora_target_modules", "VLM-R1 adapts every linear layer outside of the vision modules")
    trl.set_trl_model(conv, exact=False)
    if "model.adapter.r" in conv.fields:
        conv.put("model.adapter.target_modules", "all-linear", "use_peft", keep=True)
    _set_vision(conv)
    _set_data(conv)
    ranks = trl.set_trl_ranks(conv)
    updates = set_trl_rollouts(conv, ranks, _set_rewards)
    steps, per_epoch = trl.set_trl_steps(conv, ranks, updates)
    trl.set_trl_optimizer(conv, steps * updates)
    trl.set_trl_checkpoints(conv, per_epoch, updates)
    trl.set_trl_tracking(conv)
    _set_held_out(conv)
    conv.note(
        "token_budget is that of a micro-batch without its images: raise it if it does not hold a prompt with the "
        "tokens of its images (model.vision.max_pixels bounds them)"
    )
    return "grpo"


def _forget(conv: Conversion, name: str, why: str) -> None:
    """Says that VLM-R1 does not read an option of TRL, so that no rule of TRL does."""
    conv.drop(name, why)
    conv.given.pop(name, None)


def _set_vision(conv: Conversion) -> None:
    if conv.on("freeze_vision_modules"):
        for part in ("tower", "projector"):
            conv.put(f"model.vision.{part}.train", False, "freeze_vision_modules", keep=True)
    conv.drop("freeze_vision_modules", "all parts are trained")
    for name in ("min_pixels", "max_pixels"):
        if conv.has(name) and _is_internvl(conv):
            conv.drop(name, "VLM-R1 has no effect of it on InternVL")
        elif conv.has(name):
            conv.put(f"model.vision.{name}", conv.integer(name), name)


def _is_internvl(conv: Conversion) -> bool:
    return "internvl" in (conv.text("model_name_or_path") or "").lower()


def _set_data(conv: Conversion) -> None:
    files = _parts(conv, "data_file_paths")
    folders = _parts(conv, "image_folders") or _parts(conv, "image_root")
    names = [name for name in ("image_folders", "image_root") if conv.has(name)]
    if not files:
        conv.put("data.path", "DATA", keep=True)
        conv.need("data.path", "write the JSONL files that the YAML of --dataset_name lists, or one of them")
    elif len(files) == 1:
        conv.put("data.path", files[0], "data_file_paths")
    if len(files) > 1:
        sources = [
            {"path": path, "label": f"data-{number}"}
            | ({"images": {"folder": folders[number - 1]}} if number <= len(folders) else {})
            for number, path in enumerate(files, 1)
        ]
        conv.put("data.mixture", sources, "data_file_paths", *names)
    elif folders:
        conv.put("data.images.folder", ":".join(folders), *names)
    if files:
        conv.drop("dataset_name", "data_file_paths names the data")
    else:
        conv.refuse("dataset_name", "VLM-R1 reads a YAML with JSONL files there: write them into data.path")
    text = JSON_INSTRUCTION if _task(conv) == "rec" else INSTRUCTION
    conv.put("data.system", text, "task_type", keep=True)
    conv.need(
        "data.system",
        "VLM-R1 writes this instruction after every question (get_question_template): keep it as a system message, or "
        "write it into the questions and remove it",
    )


def _parts(conv: Conversion, name: str) -> list[str]:
    return [part for part in (conv.text(name) or "").split(":") if part] if conv.has(name) else []


def _task(conv: Conversion) -> str:
    """`rec` for boxes: chosen by the rewards of the model's module, or by the older script `grpo_rec.py`."""
    if conv.has("image_root"):
        return "rec"
    return (conv.text("task_type") or "rec") if conv.on("is_reward_customized_from_vlm_module") else "default"


def _set_rewards(conv: Conversion) -> None:
    task, methods = _task(conv), sorted(set(_parts(conv, "reward_method"))) or ["default"]
    chosen = ["reward_funcs", *(["is_reward_customized_from_vlm_module"] if task != "default" else [])]
    for name in conv.items("reward_funcs"):
        if name == "format":
            content = {"content": "box"} if task == "rec" else {}
            fields.add_term(conv, {"kind": "answer_format", "name": "format", **content}, *chosen)
        elif name == "accuracy":
            term = _box_term(conv) if task == "rec" else _accuracy_term(conv, methods)
            used = [each for each in ("reward_method", "task_type") if each in conv.given]
            fields.add_term(conv, {**term, "name": "accuracy"}, *chosen, *used)
        else:
            path = f"FILE.py:{name}"
            fields.add_term(conv, {"kind": "function", "path": path, "signature": "vlm_r1"}, "reward_funcs")
            conv.need("reward.terms", f"write the file of VLM-R1's function {name} in place of FILE.py")
    conv.drop("is_reward_customized_from_vlm_module", "the rewards of grpo_jsonl.py count")
    conv.drop("reward_method", "the rewards of the task take its place")


def _box_term(conv: Conversion) -> dict[str, Any]:
    """The IoU of the first box in the answer; 1 from 0.5 on in the older script."""
    coordinates = "original" if _is_internvl(conv) else "resized"
    older: dict[str, Any] = {"threshold": 0.5} if conv.has("image_root") else {}
    if older:
        coordinates = "original"
    return {"kind": "iou", "boxes": "first", "coordinates": coordinates, "extract": "answer", **older}


def _accuracy_term(conv: Conversion, methods: list[str]) -> dict[str, Any]:
    if len(methods) == 1 and methods[0] in _METHODS:
        return dict(_METHODS[methods[0]])
    term, problem = _NEAREST.get(methods[0], _NEAREST["default"])
    if len(methods) > 1:
        term, problem = {"kind": "text_answer", "compare": "ratio"}, "it has a method for each data file"
    conv.need(
        "reward.terms",
        f"accuracy of VLM-R1: {problem}. {term['kind']} takes its place; to keep it, name its function: {{kind: "
        "function, path: FILE.py:accuracy_reward, signature: vlm_r1}",
    )
    return dict(term)


def _set_held_out(conv: Conversion) -> None:
    if conv.number("val_split_ratio"):
        conv.refuse("val_split_ratio", "write held-out rows into a file of their own, and name it in evaluation.data")
    for name in ("val_split_ratio", "eval_strategy", "eval_steps"):
        conv.drop(name, "there is no evaluation")
