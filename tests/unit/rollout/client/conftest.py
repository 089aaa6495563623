from pathlib import Path

import pytest
from engine_stub import FakeLauncher

from lockstep.ledger.ledger import Ledger


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger.create(tmp_path / "run", {"name": "x"})


@pytest.fixture
def launcher() -> FakeLauncher:
    return FakeLauncher()
