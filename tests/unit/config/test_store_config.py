"""The address of a run's store."""

import pytest
from pydantic import ValidationError

from lockstep.config.errors import ConfigError
from lockstep.config.fault_tolerance import StoreConfig
from lockstep.config.loader import check_config


@pytest.mark.parametrize("url", ["s3://bucket/prefix", "s3://bucket", "file:///shared/runs"])
def test_an_address_alone_is_a_section(url) -> None:
    assert StoreConfig.model_validate(url) == StoreConfig(url=url)


@pytest.mark.parametrize("url", ["bucket/prefix", "ftp://host/x", "s3://", "file://relative/x", ""])
def test_other_addresses_are_refused_with_a_valid_one(url) -> None:
    with pytest.raises(ValidationError, match="file:///FOLDER"):
        StoreConfig(url=url)


def test_an_address_with_credentials_is_refused_and_not_repeated() -> None:
    values = {
        "recipe": "sft", "name": "run", "steps": 1, "model": {"path": "m"}, "data": {"path": "d"},
        "store": "s3://name:Wq8-secret-7Zx@bucket/prefix",
    }  # fmt: skip
    with pytest.raises(ConfigError, match="password") as error:
        check_config(values, "run.yaml")
    assert "Wq8-secret-7Zx" not in str(error.value)
