from pathlib import Path

import pytest

from tests.unit.doctor.configs.sample_configs import ConfigWriter


@pytest.fixture
def writer(tmp_path: Path) -> ConfigWriter:
    return ConfigWriter(tmp_path)
