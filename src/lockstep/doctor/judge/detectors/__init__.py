"""Detectors: each proposes candidate causes that no single log line shows."""
