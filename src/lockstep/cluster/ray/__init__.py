"""Ray as the allocator of nodes, CPUs and GPUs, and as the way to start processes on other hosts. Workers
are started and watched by the same agents as on one host. Nothing else in Lockstep imports Ray."""
