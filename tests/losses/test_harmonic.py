import pytest
import torch

from harmonic_sft.losses import HarmonicLoss
from harmonic_sft.models import DistLayer, LinearHead


def test_it_is_the_cross_entropy_of_a_distance_head():
    head = DistLayer(16, 40)
    states, labels = torch.randn(5, 16), torch.randint(40, (5,))
    loss = HarmonicLoss().prepare(head)(head, states, labels)
    logits = head(states).double()
    expected = torch.stack(
        [-(row.log_softmax(-1)[y]) for row, y in zip(logits, labels, strict=True)]
    )
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-6)


def test_it_is_refused_on_any_other_head():
    with pytest.raises(ValueError, match="loss harmonic: expected a dist head, got linear"):
        HarmonicLoss().prepare(LinearHead(16, 40))
