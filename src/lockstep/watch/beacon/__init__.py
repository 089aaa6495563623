"""Beacons: what a process does now, in shared memory, written in microseconds and readable without the writer's
help."""
