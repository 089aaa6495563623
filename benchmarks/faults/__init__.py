"""Faults done to real ranks, and what a real agent and supervisor say of them: `python -m benchmarks.faults`."""
