"""Reads the logs of a job: files, lines and their origin, timestamps, stack traces, progress."""
