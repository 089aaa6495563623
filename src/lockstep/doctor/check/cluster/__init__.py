"""Checks of several hosts together, run from the head."""
