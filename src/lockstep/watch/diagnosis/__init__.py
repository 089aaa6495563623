"""Derives verdicts from evidence: which processes block the others, and why."""
