"""The ladder of `lockstep check`: what is gathered on a host, and what is said about it.

Gathering has effects and a bound; what it finds is data that travels between hosts; judging is pure.
"""
