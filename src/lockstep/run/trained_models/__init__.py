"""What can be done with the models of runs, without a run: generate, evaluate, export and upload."""
