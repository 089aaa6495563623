"""What the kernel reports about the processes of this host: state, usage, activity, exit causes, stacks."""
