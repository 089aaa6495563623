"""Configs of other frameworks: OpenRLHF, verl, TRL, accelerate and DeepSpeed read, not run, and what will hurt said."""
