"""Detectors, which propose causes that no single log line shows."""
