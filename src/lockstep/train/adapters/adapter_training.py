"""What a trainer needs around the updates of an adapter: the identity of its base model, its initial values, and its
dropout.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

from lockstep.config.model import AdapterConfig, ModelConfig
from lockstep.models.hf_checkpoint import folder_digest, resolve_folder
from lockstep.models.lora import derived_seed, with_dropout, without_adapter
from lockstep.models.policy_model import PolicyModel


def base_digests(model: ModelConfig) -> dict[str, str]:
    """Returns digests of the model whose weights checkpoints lack, because an adapter is trained on them or a part of
    them is frozen; empty if all weights are trained."""
    if model.adapter is None and model.vision.trains_all:
        return {}
    digests = {"base": folder_digest(resolve_folder(model.path, model.revision))}
    if model.adapter is not None and model.adapter.path is not None:
        digests["adapter"] = folder_digest(resolve_folder(model.adapter.path, field="model.adapter.path"))
    return digests


class InitialAdapter:
    """The initial values of this rank's part of all trained parameters, kept in host memory.

    They are the reference of a KL penalty if the model without its adapter is not the initial policy, because the run
    started from an adapter or trains other weights too.

    Args:
        parts: this rank's part of each trained parameter, by name.
    """

    def __init__(self, parts: Mapping[str, Tensor]) -> None:
        self._parts = {name: tensor.detach().to("cpu", copy=True) for name, tensor in parts.items()}

    @contextmanager
    def restored(self, parts: Mapping[str, Tensor]) -> Iterator[None]:
        """Puts the initial values into `parts`, and restores the current ones exactly when the context ends."""
        current = {name: tensor.clone() for name, tensor in parts.items()}
        _copy_parts(self._parts, parts)
        try:
            yield
        finally:
            _copy_parts(current, parts)


@contextmanager
def adapter_reference(
    policy: PolicyModel,
    initial: InitialAdapter | None,
    parts: Callable[[], Mapping[str, Tensor]],
    renew_copies: Callable[[], None],
) -> Iterator[PolicyModel]:
    """Yields the reference of a policy with an adapter: the policy without it, or with the initial values of what is
    trained.

    Args:
        parts: returns this rank's part of each trained parameter, by name.
        renew_copies: frees or updates what the model computes with, such as gathered layers, once the parts changed.
    """
    if initial is None:
        with without_adapter(policy):
            yield policy
        return
    try:
        with initial.restored(parts()):
            renew_copies()
            yield policy
    finally:
        renew_copies()


def adapter_dropout(policy: PolicyModel, adapter: AdapterConfig | None) -> AbstractContextManager[None]:
    """Enables the adapter's dropout, if it has one, for a step."""
    return with_dropout(policy) if adapter is not None and adapter.lora_dropout else nullcontext()


def seed_dropout(adapter: AdapterConfig | None, *parts: int) -> None:
    """Seeds the adapter's dropout, if it has one, so that masks differ between micro-batches, but are the same when a
    step is repeated.

    Args:
        parts: the run's seed, the number of optimizer steps, the micro-batch, and the rank.
    """
    if adapter is not None and adapter.lora_dropout:
        torch.manual_seed(derived_seed(*parts))


@torch.no_grad()
def _copy_parts(values: Mapping[str, Tensor], parts: Mapping[str, Tensor]) -> None:
    for name, tensor in parts.items():
        tensor.copy_(values[name])
