"""Basics that every package may import: waits, errors, text, secrets, folders, network, malloc, transport. They import
no other package of Lockstep and need the standard library only."""
