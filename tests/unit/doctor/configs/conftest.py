from pathlib import Path

import pytest

from tests.unit.doctor.configs.sample_configs import Desk


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)
