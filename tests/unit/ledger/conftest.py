from collections.abc import Iterator
from pathlib import Path

import pytest
from ledger_helpers import CONFIG

from lockstep.ledger import Ledger


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "sort"


@pytest.fixture
def ledger(folder: Path) -> Iterator[Ledger]:
    with Ledger.create(folder, CONFIG) as made:
        yield made
