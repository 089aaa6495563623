"""Faults in real ranks, and the verdicts of a real agent and supervisor: `python -m benchmarks.faults`."""
