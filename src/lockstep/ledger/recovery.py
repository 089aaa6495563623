"""What a killed process left half-done in a run's folder is cleared away, or taken in where it was complete."""

from pathlib import Path

from lockstep.ledger import stepfile, values
from lockstep.ledger.errors import StepCorrupt
from lockstep.ledger.files import replace, sha256_of
from lockstep.ledger.index import Index
from lockstep.ledger.rules import add_step, as_yaml

CONFIG = "config.yaml"


def recover(folder: Path, index: Index) -> None:
    """Brings folder and index into line after a kill: unfinished files go, a step file that reached its name but not
    the index is taken in (it was complete before it got the name)."""
    known = {step: bool(removed) for step, removed in index.rows("SELECT step, removed FROM steps")}
    for path in sorted((folder / "steps").iterdir()):
        step = int(path.stem) if path.stem.isdigit() else None
        if path.name.startswith(".") and path.suffix == ".tmp":
            path.unlink(missing_ok=True)
        elif step is not None and path.suffix == ".arrow" and step not in known:
            _adopt(index, step, path)
        elif step is not None and ((path.suffix == ".arrow" and known[step]) or _superseded(index, path, step)):
            path.unlink(missing_ok=True)
    readable, config = folder / CONFIG, as_yaml(dict(values.loads(index.meta("config"))))
    if not readable.exists() or readable.read_bytes() != config:
        replace(readable, config)


def _superseded(index: Index, path: Path, step: int) -> bool:
    return path.suffix == ".partial" and bool(index.rows("SELECT 1 FROM steps WHERE step = ?", step))


def _adopt(index: Index, step: int, path: Path) -> None:
    try:
        stored = stepfile.read_file(path, step)
    except StepCorrupt:
        path.rename(path.with_suffix(".rejected"))
        with index.transaction() as transaction:
            fields = values.dumps({"step": step, "path": str(path)}, "step_rejected")
            transaction.put("events", kind="step_rejected", fields=fields)
        return
    with index.transaction() as transaction:
        add_step(transaction, stored.rollouts, sha256_of(path), path.stat().st_size)
