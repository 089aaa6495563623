"""The ground floor: waits, errors, text, secrets, folders, network, threads, transport. Every room may import it; it
imports nothing of Lockstep and needs the standard library only.
"""
