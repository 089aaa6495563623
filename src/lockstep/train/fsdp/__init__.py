"""The FSDP2 trainer: parameters, gradients and optimizer state are sharded over the ranks."""
