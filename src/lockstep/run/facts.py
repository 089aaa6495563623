"""Facts a plan is made from: of the model, without its weights, and of this host."""

import os
from pathlib import Path
from typing import Any

import psutil
import torch

from lockstep.config.cluster import LocalCluster
from lockstep.config.model import Model
from lockstep.models.load import context_length, load_policy, resolve_dtype
from lockstep.run.plan import HostFacts, ModelFacts

UNLIMITED = 1 << 60


def model_facts(cfg: Model, device: str) -> ModelFacts:
    """Builds the model without weights and counts. ModelError where it cannot be built."""
    policy = load_policy(cfg, "cpu", meta=True)
    config: Any = policy.config.get_text_config()
    heads = config.num_attention_heads
    return ModelFacts(
        parameters=sum(parameter.numel() for parameter in policy.parameters()),
        layers=len(policy.layers),
        hidden=config.hidden_size,
        vocabulary=config.vocab_size,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        context=min(cfg.max_length or UNLIMITED, context_length(policy.config)),
        dtype=str(resolve_dtype(cfg.dtype, device)).removeprefix("torch."),
    )


def host_facts(cfg: LocalCluster) -> HostFacts:
    """Cores, memory (the container's where it is less), shared memory and GPUs of this host."""
    gpus = torch.cuda.device_count() if cfg.device != "cpu" else 0
    return HostFacts(
        cores=len(os.sched_getaffinity(0)),
        memory=min(psutil.virtual_memory().available, _cgroup_memory()),
        shared_memory=psutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else 0,
        device="cuda" if gpus or cfg.device == "cuda" else "cpu",
        gpus=gpus,
    )


def _cgroup_memory() -> int:
    """Bytes that the container still allows; a huge number where it sets no limit."""
    root = Path("/sys/fs/cgroup")
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            allowed = (root / limit).read_text().strip()
            taken = int((root / used).read_text())
        except (OSError, ValueError):
            continue
        if allowed != "max":
            return max(0, int(allowed) - taken)
    return UNLIMITED
