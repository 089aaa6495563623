"""Makes `benchmarks/cases/ran`: real small jobs, each with a fault that was put in on purpose, or none."""
