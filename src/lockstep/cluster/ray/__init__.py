"""Ray as the allocator of nodes, CPUs and GPUs, and as the way to start processes on other hosts. The same agents as on
one host start, call and watch the workers. Nothing else in Lockstep imports Ray."""
