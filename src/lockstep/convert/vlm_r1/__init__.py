"""The rules of VLM-R1."""
