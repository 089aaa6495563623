"""The jobs, by what runs them. A list is a module with JOBS."""
