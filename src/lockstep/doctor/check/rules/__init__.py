"""Pure functions that judge facts and configs and return findings."""
