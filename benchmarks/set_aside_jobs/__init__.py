"""Makes the jobs of the cases set aside (`set_aside` to `eighth_set_aside`): small, with known faults or none.

Whoever writes rules or factors for the diagnosis reads neither this folder nor those jobs.

    python -m benchmarks.set_aside_jobs run NAME...     # runs jobs and stores their output
    python -m benchmarks.set_aside_jobs truth           # writes truth.json from the entries
"""
