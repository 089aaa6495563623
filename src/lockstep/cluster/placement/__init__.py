"""The placement of a run's processes on nodes, and the reservation of resources."""
