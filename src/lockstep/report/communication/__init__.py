"""Which rank makes the others wait in collectives, and how evenly the ranks are loaded, from the folder of a run."""
