"""The recorder says when the installed torch does not fit it."""

import re
from types import SimpleNamespace

import pytest
from torch.distributed import distributed_c10d as c10d

from lockstep.watch.recorder import torch_fit


def fake(**changed):
    return SimpleNamespace(**{**vars(c10d), **changed})


def test_the_installed_torch_fits():
    assert torch_fit.check_torch(c10d) == []


def test_a_renamed_parameter_is_reported_and_the_others_are_recorded():
    (gap,) = torch_fit.check_torch(fake(all_reduce=lambda values, group=None: None))
    assert gap == "all_reduce has no parameter tensor: its calls are not recorded"


def test_communicators_that_cannot_be_found_are_an_error():
    with pytest.raises(torch_fit.TorchDoesNotFit, match=re.escape("_new_process_group_helper has no parameter 'group")):
        torch_fit.check_torch(fake(_new_process_group_helper=lambda size, rank, global_ranks_in_group: None))


def test_arguments_are_found_by_name_wherever_they_stand():
    def create(backend, group_desc, group_name, size, global_ranks_in_group):
        """As a later torch might have it."""

    found = torch_fit.create_arguments(create, ("gloo", "fsdp", "7"), {"size": 2, "global_ranks_in_group": [4, 6]})
    assert found == {"global_ranks_in_group": [4, 6], "group_name": "7", "group_desc": "fsdp"}
