"""Converts launch scripts and configs of OpenRLHF, verl and TRL to a run's config, without running any of them."""
