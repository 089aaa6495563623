"""Makes the jobs of the `set_aside`, `second_set_aside` and `third_set_aside` cases: small, with known faults or none.

Whoever writes rules or factors for the diagnosis reads neither this folder nor those jobs.

    python -m benchmarks.set_aside_jobs run NAME...     # runs jobs and stores their output
    python -m benchmarks.set_aside_jobs truth           # writes truth.json from the entries
"""
