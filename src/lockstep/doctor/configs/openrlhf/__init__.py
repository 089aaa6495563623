"""OpenRLHF's command lines."""
