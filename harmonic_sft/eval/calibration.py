"""Whether a model is right as often as it says: the expected calibration error."""

import torch.nn.functional as F
from torch import Tensor

NUM_BINS = 15


def calibration_gaps(confidences: Tensor, correct: Tensor, num_bins: int = NUM_BINS) -> Tensor:
    """Return confidence minus correctness of every prediction, in the column of its bin.

    Sums of these rows are all that the error needs, so that it adds up over batches and processes.

    Args:
        confidences: `[N]`, probability of the predicted class.
        correct: `[N]`, whether it was the right one.
        num_bins: Bins of equal width from 0 to 1.

    Returns:
        `[N, num_bins]`, 0 outside the bin of the row.
    """
    bins = (confidences * num_bins).long().clamp(0, num_bins - 1)  # [N]
    gaps = confidences - correct.to(confidences.dtype)
    return F.one_hot(bins, num_bins) * gaps.unsqueeze(-1)


def expected_calibration_error(
    confidences: Tensor, correct: Tensor, num_bins: int = NUM_BINS
) -> float:
    """Return the mean distance between confidence and accuracy of a bin, by its share.

    Args:
        confidences: `[N]`, probability of the predicted class.
        correct: `[N]`, whether it was the right one.
        num_bins: Bins of equal width from 0 to 1.

    Returns:
        From 0 to 1; 0 is calibrated.

    Raises:
        ValueError: No prediction.

    Source:
        Guo et al. 2017, On Calibration of Modern Neural Networks, arXiv:1706.04599, Eq. 3, of the
        most probable class.
    """
    if not len(confidences):
        raise ValueError("confidences: expected at least one prediction, got none")
    gaps = calibration_gaps(confidences.double(), correct, num_bins).sum(0)  # [num_bins]
    return gaps.abs().sum().item() / len(confidences)
