"""Jobs of `benchmarks/cases/seventh_set_aside` that ran."""

from benchmarks.set_aside_jobs.entry import Entry

ENTRIES: list[Entry] = []
