"""The part of `lockstep check` that looks at the images of a run's data."""

import os
from importlib.util import find_spec
from pathlib import Path
from shutil import disk_usage

import PIL.Image
from transformers import AutoConfig

from lockstep.config.run_config import RunConfig
from lockstep.config.vision import packages_for_vllm
from lockstep.data.images.image_processor import ImageProcessor
from lockstep.data.images.image_usage import ImageUsage
from lockstep.doctor.check.rules.image_rules import ImageDemand, judge_images
from lockstep.doctor.output.findings import Finding
from lockstep.models.hf_checkpoint import resolve_folder
from lockstep.models.model_facts import ModelFacts
from lockstep.run.planning.prepare import DryRun
from lockstep.run.planning.resources import host_resources


def image_findings(config: RunConfig, model: ModelFacts, found: DryRun | None) -> list[Finding]:
    """Judges what the images of the data, or of an environment's answers, need; no findings without images, or if the
    data was not opened.

    Args:
        model: the policy's.
    """
    if found is None or found.data is None or found.data.processor is None or not found.data.has_images:
        return []
    usage, vision, plan = found.data.image_usage, model.vision, found.plan
    folder = resolve_folder(config.model.path, config.model.revision, weights=False)
    family = AutoConfig.from_pretrained(folder, trust_remote_code=config.model.trust_remote_code).model_type
    demand = ImageDemand(
        family=family,
        samples=usage.samples,
        images=usage.images,
        most_images=usage.most_images,
        most_tokens=usage.most_tokens,
        largest=usage.largest,
        largest_size=usage.largest_size,
        mean_tokens=usage.tokens / max(usage.images, 1),
        token_bytes=_token_bytes(found.data.processor, usage) if usage.images else 0,
        tower=0 if vision is None else vision.tower + vision.projector,
        disk_free=_free_bytes(Path(config.folder)),
        shm_free=host_resources(config.cluster).shared_memory if config.cluster.kind == "local" else None,
        shm_other=plan.shared_memory + plan.memory_copy,
        on_cpu=any(process.role == "rollout" and process.device == "cpu" for process in plan.processes),
        missing=tuple(name for name in packages_for_vllm(family) if find_spec(name) is None),
    )
    return list(judge_images(config, demand, os.environ))


def _token_bytes(processor: ImageProcessor, usage: ImageUsage) -> int:
    """Bytes of a prepared image for each of its tokens, as the largest image of the data has them."""
    image = processor.prepare(PIL.Image.new("RGB", usage.largest_size), "0" * 32)
    return -(-sum(array.nbytes for array in image.inputs.values()) // image.features)


def _free_bytes(folder: Path) -> int | None:
    """Free bytes of the disk on which a folder is or will be; None if that cannot be read."""
    there = next((each for each in (folder, *folder.absolute().parents) if each.is_dir()), Path("/"))
    try:
        return disk_usage(there).free
    except OSError:
        return None
