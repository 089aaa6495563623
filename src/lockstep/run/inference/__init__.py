"""Generates with the models of runs, and evaluates them, without a run."""
