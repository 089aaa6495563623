"""Exports a model, or its adapter, as a Hugging Face folder, one parameter at a time."""

import contextlib
import copy
import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from lockstep.base import waits
from lockstep.base.disk_errors import REFUSED_ERRNOS, refusal_reason
from lockstep.base.folders import describe_kind
from lockstep.config.model import ModelConfig
from lockstep.models.folder_digests import tensor_digests, write_digests
from lockstep.models.hf_checkpoint import named_state, resolve_folder
from lockstep.models.huggingface import quiet_transformers
from lockstep.models.lora import peft_config
from lockstep.models.model_loader import load_tokenizer
from lockstep.models.policy_model import PolicyModel
from lockstep.models.score_model import ScoreModel, set_padding_for_scores
from lockstep.models.weight_conversion import CheckpointGroup, checkpoint_groups, to_checkpoint
from lockstep.train.checkpoints.checkpoint import commit_folder
from lockstep.train.checkpoints.checkpoint_files import as_os_error, sync_file
from lockstep.train.distributed import ParallelContext
from lockstep.train.errors import CheckpointError
from lockstep.train.lazy_weights import LazyWeight
from lockstep.watch.beacon.writer import current_beacon

DIGESTS_LIMIT_S = 600.0
"""Limit for the digests of one file, whose tensors are in memory."""
MAX_FILE_BYTES = 5_000_000_000
"""Largest safetensors file, unless a single weight is larger."""


def export_model(
    folder: Path,
    policy: PolicyModel,
    weights: Mapping[str, LazyWeight],
    model: ModelConfig,
    dtype: torch.dtype,
    ranks: ParallelContext,
    added: Mapping[str, Any] = MappingProxyType({}),
    file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Writes config, tokenizer and weights (in `dtype`) into `folder`, which appears when it is complete.

    All ranks call it. Rank 0 holds the tensors of at most one file, the others only their own rows.

    Args:
        added: values to add to the config.

    Raises:
        CheckpointError: something could not be written; raised on rank 0 only, and `folder` is unchanged.
    """
    temporary = folder.with_name(f"{folder.name}.tmp-export")
    groups = checkpoint_groups(policy.lm, {name: weight.shape for name, weight in weights.items()})
    files = _plan_files(groups, dtype, file_bytes)
    buffers = {name: value.cpu() for name, value in named_state(policy) if not isinstance(value, nn.Parameter)}
    error: OSError | SafetensorError | None = None
    if ranks.rank == 0:
        shutil.rmtree(temporary, ignore_errors=True)  # left by an interrupted export
    done = 0
    written: dict[str, dict[str, str]] = {}
    """The digests of the tensors in each file."""
    for file, members in files.items():
        tensors: dict[str, Tensor] = {} if done else to_checkpoint(policy.lm, buffers)
        for group in members:
            whole = _gather_group(group, weights, dtype, ranks)
            # A rank that failed to write continues to gather, because its peers wait for it.
            if whole is not None and error is None:
                tensors |= to_checkpoint(policy.lm, whole)
            done += len(group.weights)
            current_beacon().progress("tensors exported", done, len(weights))
        if ranks.rank == 0 and error is None:
            try:
                written[file] = _write_weights(temporary, file, tensors)
            except (OSError, SafetensorError) as problem:
                error = problem
    if ranks.rank == 0:
        size = sum(_group_bytes(group, dtype) for group in groups)
        _finish_export(folder, temporary, policy, written, size, model, dtype, added, error)


def _gather_group(
    group: CheckpointGroup, weights: Mapping[str, LazyWeight], dtype: torch.dtype, ranks: ParallelContext
) -> dict[str, Tensor] | None:
    """Gathers the weights of a group on rank 0; returns None on other ranks."""
    found = {}
    for name in group.weights:
        rows = weights[name].rows().to(dtype)
        whole = ranks.gather_rows(rows, weights[name].shape[0], why=f"export {name}")
        if whole is not None:
            found[name] = whole
    return found or None


def export_adapter(
    folder: Path, policy: PolicyModel, adapter: Mapping[str, Tensor], model: ModelConfig, ranks: ParallelContext
) -> None:
    """Writes an adapter, the weights that are trained with it (`modules_to_save`), and the tokenizer, as peft does.
    Only rank 0 writes.

    Args:
        adapter: all trained tensors, complete, by their names in peft's files.

    Raises:
        CheckpointError: something could not be written; `folder` is unchanged.
    """
    if ranks.rank or model.adapter is None:
        return
    temporary = folder.with_name(f"{folder.name}.tmp-export")
    base = Path(model.path).expanduser()
    settings = peft_config(policy, model.adapter)
    settings.base_model_name_or_path = str(base.resolve()) if base.is_dir() else model.path
    settings.inference_mode = True
    with _commit_or_discard(temporary, folder, "adapter"):
        shutil.rmtree(temporary, ignore_errors=True)
        file = "adapter_model.safetensors"
        digests = _write_weights(temporary, file, {name: part.cpu() for name, part in adapter.items()})
        tokenizer = load_tokenizer(model)
        if isinstance(policy, ScoreModel):
            set_padding_for_scores(tokenizer)
        with quiet_transformers():
            settings.save_pretrained(temporary)
            tokenizer.save_pretrained(temporary)
        _copy_files(resolve_folder(model.path, model.revision), temporary, _processor_files(model))
        write_digests(temporary, {file: digests})


def _finish_export(
    folder: Path,
    temporary: Path,
    policy: PolicyModel,
    files: Mapping[str, Mapping[str, str]],
    size: int,
    model: ModelConfig,
    dtype: torch.dtype,
    added: Mapping[str, Any],
    error: OSError | SafetensorError | None,
) -> None:
    with _commit_or_discard(temporary, folder, "model"):
        if error is not None:
            raise error
        _write_config_and_tokenizer(temporary, policy, model, dtype, added)
        if len(files) > 1 or "model.safetensors" not in files:
            _write_index(temporary, files, size)
        write_digests(temporary, files)


@contextmanager
def _commit_or_discard(temporary: Path, folder: Path, what: str) -> Iterator[None]:
    """Syncs the files that the block writes and renames the folder to its final name. Deletes it if the block fails."""
    try:
        yield
        for path in temporary.iterdir():
            sync_file(path)
        commit_folder(temporary, folder)
    except (OSError, SafetensorError) as problem:
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(problem, SafetensorError):
            problem = as_os_error(problem, folder)
        why = f"; {refusal_reason(problem.errno, folder)}" if problem.errno in REFUSED_ERRNOS else ""
        raise CheckpointError(folder, f"the {what} could not be exported: {problem}{why}") from problem


def _write_weights(folder: Path, file: str, tensors: dict[str, Tensor]) -> dict[str, str]:
    """Writes a file durably, and meanwhile computes the digests of its tensors from memory. Returns the digests."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        folder.mkdir()
    if folder.is_symlink():  # in a folder that others may write to
        raise OSError(f"{folder} is {describe_kind(folder)}: remove it")
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    digests = waits.run_in_thread(lambda: tensor_digests(whole), name="digests")
    save_file(whole, folder / file, {"format": "pt"})
    sync_file(folder / file)
    return waits.future(digests, waits_for="digests", why=f"the digests of {file}", timeout_s=DIGESTS_LIMIT_S)


def _write_config_and_tokenizer(
    folder: Path, policy: PolicyModel, model: ModelConfig, dtype: torch.dtype, added: Mapping[str, Any]
) -> None:
    """Writes config, generation config, tokenizer, image processor, and the code of a model with remote code."""
    source = resolve_folder(model.path, model.revision)
    config = copy.deepcopy(policy.config)
    config.dtype = dtype
    if hasattr(config, "quantization_config"):  # the exported weights are not quantized
        del config.quantization_config
    config.architectures = [policy.architecture]
    for name, value in added.items():
        setattr(config, name, value)
    tokenizer = load_tokenizer(model)
    if isinstance(policy, ScoreModel):
        config.get_text_config().pad_token_id = set_padding_for_scores(tokenizer)
    with quiet_transformers():
        config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    _copy_files(source, folder, ["*.py", "generation_config.json", *_processor_files(model)])


def _processor_files(model: ModelConfig) -> list[str]:
    """Returns the files of a vision-language model's processor. Its chat template is replaced by the configured one,
    which the tokenizer has."""
    own_template = ["chat_template.json"] if model.chat_template is None else []
    return ["preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json", *own_template]


def _copy_files(source: Path, folder: Path, patterns: Iterable[str]) -> None:
    for path in sorted(path for pattern in patterns for path in source.glob(pattern)):
        shutil.copyfile(path, folder / path.name)


def _write_index(folder: Path, files: Mapping[str, Iterable[str]], total: int) -> None:
    weight_map = {name: file for file, names in files.items() for name in names}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _plan_files(groups: list[CheckpointGroup], dtype: torch.dtype, limit: int) -> dict[str, list[CheckpointGroup]]:
    """Returns the groups of each file, in order. File names are those that transformers uses."""
    parts = list(_divide_by_size(groups, dtype, limit))
    if len(parts) == 1:
        return {"model.safetensors": parts[0]}
    return {f"model-{i:05d}-of-{len(parts):05d}.safetensors": part for i, part in enumerate(parts, start=1)}


def _divide_by_size(groups: list[CheckpointGroup], dtype: torch.dtype, limit: int) -> Iterator[list[CheckpointGroup]]:
    part: list[CheckpointGroup] = []
    total = 0
    for group in groups:
        size = _group_bytes(group, dtype)
        if part and total + size > limit:
            yield part
            part, total = [], 0
        part.append(group)
        total += size
    yield part


def _group_bytes(group: CheckpointGroup, dtype: torch.dtype) -> int:
    return sum(torch.Size(shape).numel() for shape in group.tensors.values()) * dtype.itemsize
