"""The node agent: parent of the workers of its node, monitor of the run's processes there."""
