"""Checkpoints on disk and in memory: writing, reading, and which ones to keep."""
