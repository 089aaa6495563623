"""Ray as the allocator of nodes, CPUs and GPUs and as the way to other hosts. What runs there is started, called and
watched by the same agents as on one host. Nothing else of Lockstep imports Ray."""
