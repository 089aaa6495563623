"""Configs of other frameworks: reads OpenRLHF, verl, TRL, accelerate and DeepSpeed without running them, and reports
what will go wrong."""
