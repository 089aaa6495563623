"""A reference that follows the policy (TR-DPO, Gorbatovski et al. 2024)."""

import torch

from lockstep.models.policy_model import PolicyModel
from lockstep.train.checkpoints.checkpoint import LocalRows
from lockstep.train.fsdp.parallelize import local_shard


@torch.no_grad()
def mix_into_reference(reference: PolicyModel, policy: PolicyModel, share: float) -> None:
    """Replaces this rank's rows of the reference by `(1 - share) * reference + share * policy` (equation 6). The sum is
    in float32, whatever the precision of the reference. Both models are sharded alike, and not gathered."""
    moved = dict(reference.named_parameters())
    for name, parameter in policy.named_parameters():
        if parameter.requires_grad:  # a frozen part is the same in both
            rows = local_shard(moved[name])
            rows.copy_(torch.lerp(rows.float(), local_shard(parameter).float(), share))


def reference_rows(reference: PolicyModel, policy: PolicyModel) -> dict[str, LocalRows]:
    """This rank's rows of a reference's weights, by name, for checkpoints: of all weights that the policy trains."""
    rows = {name: LocalRows(local_shard(each), tuple(each.shape)) for name, each in reference.named_parameters()}
    return {name: rows[name] for name, each in policy.named_parameters() if each.requires_grad}
