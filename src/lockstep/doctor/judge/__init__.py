"""Diagnoses a job from its parsed logs: history, candidate causes, culprits, verdict."""
