"""Framed, authenticated connections between the processes of a run."""
