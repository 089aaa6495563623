"""What is measured of a run on held-out data, and what follows from it."""
