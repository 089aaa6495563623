"""Weight sync from the trainer to the engines: the plan, the store in shared memory, relays and device streams."""
