"""A reference that follows the policy (TR-DPO, Gorbatovski et al. 2024)."""

import torch

from lockstep.models.policy_model import PolicyModel
from lockstep.train.checkpoints.checkpoint import LocalRows
from lockstep.train.fsdp.parallelize import local_shard


@torch.no_grad()
def mix_into_reference(reference: PolicyModel, policy: PolicyModel, share: float) -> None:
    """Replaces this rank's rows of the reference by `(1 - share) * reference + share * policy` (equation 6). The sum is
    in float32, whatever the precision of the reference. Both models are sharded alike, and not gathered."""
    of_policy = dict(policy.named_parameters())
    for name, parameter in reference.named_parameters():
        rows = local_shard(parameter)
        rows.copy_(torch.lerp(rows.float(), local_shard(of_policy[name]).float(), share))


def reference_rows(reference: PolicyModel) -> dict[str, LocalRows]:
    """This rank's rows of a reference's weights, by name, for checkpoints."""
    return {name: LocalRows(local_shard(each), tuple(each.shape)) for name, each in reference.named_parameters()}
