"""What a run folder of Lockstep records about its run."""
