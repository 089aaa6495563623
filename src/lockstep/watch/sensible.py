"""Which waits say something about who is to blame."""

from dataclasses import replace

from lockstep.watch.evidence import Edge, Evidence

OUTSIDE = ("http", "read", "write", "send", "store", "connect")
"""Kinds of waits whose unknown names are services; of the others they are a process's own threads, or nobody."""


def sensible(evidence: Evidence) -> Evidence:
    """Without the edges to nobody in particular: a thread's own helper, a file, the clock. Who waits so is itself what
    others wait for."""
    return replace(evidence, edges=[edge for edge in evidence.edges if _says_something(edge)])


def _says_something(edge: Edge) -> bool:
    return bool(edge.on) or edge.idle or bool(edge.meeting) or edge.kind in OUTSIDE
