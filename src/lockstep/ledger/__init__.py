"""The durable record of a run: `Ledger`, its rows and its errors."""

from lockstep.ledger.config_changes import ConfigChange, compare_config
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
    StepCollected,
    StepConflict,
    StepCorrupt,
)
from lockstep.ledger.ledger import Ledger
from lockstep.ledger.sqlite_index import (
    CheckpointRow,
    CommitRow,
    EvaluationRow,
    EvaluationSample,
    EventRow,
    MetricsRow,
    StoredStep,
)

__all__ = [
    "CheckpointRow",
    "CommitRow",
    "ConfigChange",
    "ConfigChanged",
    "EvaluationRow",
    "EvaluationSample",
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
    "StaleGeneration",
    "StepCollected",
    "StepConflict",
    "StepCorrupt",
    "StoredStep",
    "compare_config",
]
