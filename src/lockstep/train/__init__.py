"""The trainer protocol, the FSDP2 trainer, objectives, checkpoints and export."""
