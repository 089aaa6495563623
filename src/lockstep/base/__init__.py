"""Basics that every package may import: waits, errors, text, secrets, folders, network, threads, transport. They import
nothing else of Lockstep and need the standard library only."""
