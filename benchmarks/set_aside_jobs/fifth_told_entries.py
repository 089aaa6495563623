"""x."""

from benchmarks.set_aside_jobs.entry import Entry

ENTRIES: list[Entry] = []
