"""Metrics, HTML report, run summary, and what the terminal shows during a run."""
