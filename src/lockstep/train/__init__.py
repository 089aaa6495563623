"""The trainer protocol and the kinds of trainers, objectives, checkpoints and export."""
