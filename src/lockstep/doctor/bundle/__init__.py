"""Bundles to attach to a bug report: the files of a job without names, addresses and secrets."""
