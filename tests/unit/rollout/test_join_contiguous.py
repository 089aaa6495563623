"""Adjacent tensors are joined as a view, others are copied."""

import pytest
import torch

from lockstep.rollout.weight_loading import join_contiguous

WHOLE = torch.arange(60.0)


@pytest.mark.parametrize(
    ("pieces", "in_place"),
    [
        pytest.param([WHOLE[:12].view(4, 3), WHOLE[12:18].view(2, 3)], True, id="neighbours"),
        pytest.param([WHOLE[6:9].view(1, 3)], True, id="one"),
        pytest.param([WHOLE[3:5], WHOLE[5:9]], True, id="biases"),
        pytest.param([WHOLE[:12].view(4, 3), WHOLE[15:18].view(1, 3)], False, id="gap"),
        pytest.param([WHOLE[12:18].view(2, 3), WHOLE[:12].view(4, 3)], False, id="other-order"),
        pytest.param([WHOLE[:6].view(2, 3), WHOLE[6:9].clone().view(1, 3)], False, id="other-memory"),
    ],
)
def test_pieces_are_joined(pieces, in_place):
    found = join_contiguous(pieces)
    assert torch.equal(found, torch.cat(pieces)) and found.is_contiguous()
    assert (found.data_ptr() == pieces[0].data_ptr()) == in_place
