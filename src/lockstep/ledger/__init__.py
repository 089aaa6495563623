"""What a run has done: `Ledger`, its rows and its errors."""

from lockstep.ledger.changes import Change, compare_config
from lockstep.ledger.errors import (
    ConfigChanged,
    FolderExists,
    IndexDamaged,
    LedgerBusy,
    LedgerError,
    LedgerFull,
    NotARun,
    OutOfOrder,
    PromptUsedTwice,
    RunIsActive,
    StaleGeneration,
    StepConflict,
    StepCorrupt,
)
from lockstep.ledger.ledger import Ledger
from lockstep.ledger.records import CheckpointRow, CommitRow, EvaluationRow, EventRow, MetricsRow, Sample, Stored

__all__ = [
    "Change",
    "CheckpointRow",
    "CommitRow",
    "ConfigChanged",
    "EvaluationRow",
    "EventRow",
    "FolderExists",
    "IndexDamaged",
    "Ledger",
    "LedgerBusy",
    "LedgerError",
    "LedgerFull",
    "MetricsRow",
    "NotARun",
    "OutOfOrder",
    "PromptUsedTwice",
    "RunIsActive",
    "Sample",
    "StaleGeneration",
    "StepConflict",
    "StepCorrupt",
    "Stored",
    "compare_config",
]
