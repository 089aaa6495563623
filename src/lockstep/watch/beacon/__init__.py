"""Beacons: small files in shared memory in which processes publish what they are doing. Writing takes microseconds, and
readers need no cooperation of the writer."""
