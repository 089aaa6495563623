"""The probe that a check runs on every host, its messages and its tests."""
