"""The seed of every completion, a pure function of where it stands in the run."""

import hashlib


def request_seed(run_seed: int, step: int, uid: str, k: int) -> int:
    """Seed of the `k`-th completion of prompt `uid` at `step`: a stable hash, 0 <= seed < 2**63.

    The same on every machine, process and version of Python, so that a generation that is taken up again after
    a fault goes on as it would have.
    """
    digest = hashlib.blake2b(f"{run_seed}\0{step}\0{uid}\0{k}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
