"""How far a policy has moved from its reference over the vocabulary: in place of a KL divergence.

Experimental: nobody has trained a large model with it.
"""

import torch
from torch import Tensor

NOTHING = 1e-12  # total variation below which distributions are the same


def w2_penalty(policy_logits: Tensor, reference_logits: Tensor, prototypes: Tensor) -> Tensor:
    """Return an upper bound of the squared 2-Wasserstein distance of two next-token distributions.

    What both distributions give a token stays there, and what the policy has given up goes to what
    it has gained in proportion (the maximal coupling, its rest independent): with a = (p - r)+,
    b = (r - p)+ and their common sum t the bound is sum_jk a_j b_k |e_j - e_k| ** 2 / t. It is 0
    where the distributions agree, exact where one of them is a Dirac or only two tokens differ, and
    moving to a token nearby costs little, which a KL divergence does not see. Two products of
    N x V x D multiplications instead of a transport problem.

    Args:
        policy_logits: `[N, V]`, p; gradients flow through them.
        reference_logits: `[N, V]`, r; none do.
        prototypes: `[V, D]`, where the tokens are, such as `head.prototypes`; none do.

    Returns:
        `[N]`, in squared units of the prototypes.

    Source:
        Maximal coupling: Lindvall 1992, Lectures on the Coupling Method, Sec. I.5. As a penalty:
        the open question of the geometry note, whether the KL divergence of preference training
        can be a Wasserstein expectation.
    """
    wide = torch.promote_types(policy_logits.dtype, torch.float32)
    with torch.autocast(policy_logits.device.type, enabled=False):
        policy = policy_logits.to(wide).softmax(-1)
        reference = reference_logits.detach().to(wide).softmax(-1)
        change, points = policy - reference, prototypes.detach().to(wide)
        gained, given_up = change.clamp_min(0), (-change).clamp_min(0)
        moved = gained.sum(-1)  # [N], the total variation
        # Only differences count, and a common mean takes their digits.
        points = points - points.mean(0)
        squares = points.square().sum(-1)  # [V]
        # Where nothing moved the last term is 0 / 0, and near there the slope of 1 / t overflows.
        inverse = torch.where(moved > NOTHING, moved, 1.0).reciprocal()
        cross = torch.linalg.vecdot(gained @ points, given_up @ points) * inverse
        return (gained + given_up) @ squares - 2 * cross
