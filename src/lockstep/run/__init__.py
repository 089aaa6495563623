"""Prepares a run, wires its roles together, and drives its steps, checkpoints and recovery."""
