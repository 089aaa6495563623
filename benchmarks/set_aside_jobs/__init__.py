"""Makes the jobs of `benchmarks/cases/set_aside` and `second_set_aside`: small jobs with known faults or none.

Whoever writes rules or factors for the diagnosis reads neither this folder nor those jobs.

    python -m benchmarks.set_aside_jobs run NAME...     # runs jobs and stores their output
    python -m benchmarks.set_aside_jobs truth           # writes truth.json from the entries
"""
