"""`lockstep watch -- COMMAND`: monitoring for jobs that do not use Lockstep."""
