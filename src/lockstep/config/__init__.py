"""The config of a run: pydantic models, the loader, and the reference of all fields. Imports no torch."""
