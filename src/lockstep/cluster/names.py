"""Names of workers: each one of a kind in a run, as their beacons and logs are found by them."""

import re
from collections.abc import Collection, Sequence

from lockstep.cluster.protocol import WorkerSpec

RESERVED = ("agent", "controller", "supervisor")
"""Names that beacons of a run have already."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,94}")


def check_names(specs: Sequence[WorkerSpec], living: Collection[str]) -> None:
    """Raises ValueError for a name that cannot be a file's, or that another worker has."""
    taken = set(living)
    for spec in specs:
        if not _NAME.fullmatch(spec.name) or spec.name in RESERVED:
            raise ValueError(
                f"worker name {spec.name!r}: expected up to 95 letters, digits, '.', '_' or '-', and not one of "
                f"{', '.join(RESERVED)}"
            )
        if spec.name in taken:
            raise ValueError(f"worker name {spec.name!r} is taken; names are unique in a run")
        taken.add(spec.name)
