"""Policy training with a Wasserstein penalty instead of a KL divergence: experimental.

    python scripts/grpo_example.py MODEL --word " war" [--penalty w2 | kl] [--weight 0.1]

MODEL is a folder or Hub id of a causal language model, such as `runs/small_gpt`. Groups of
continuations are sampled from the model, each is rewarded for how near its tokens are in meaning to
WORD, advantages are taken within the group as in GRPO, and a penalty on every sampled position
keeps the policy near the model it was. The loop is TRL's in small: what it adds there to
`per_token_loss` is `weight * penalty`, made of the logits of policy and reference.

Source:
    GRPO: Shao et al. 2024, DeepSeekMath, arXiv:2402.03300, Eq. 3, one update for each batch of
    samples, so that the probability ratio is 1. The penalty: the open question of the geometry
    note, whether the KL divergence can be a Wasserstein expectation.
"""

import argparse
import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from harmonic_sft.models import HarmonicForCausalLM
from harmonic_sft.models.backbones import CACHE
from harmonic_sft.results import show_table

NEW_TOKENS = 12  # of a sample
PROMPTS = ("In the year", "The city of", "It was the first", "He was born")
NOTHING = 1e-12  # total variation below which distributions are the same
Penalty = Callable[[Tensor, Tensor, Tensor], Tensor]


class Step(NamedTuple):
    """What one step saw, before its update.

    Attributes:
        reward: Mean over all samples, a cosine.
        w2: Mean of the penalty `w2` over sampled positions, in squared units of unit prototypes.
        kl: Mean KL(policy || reference) there, in nats.
    """

    reward: float
    w2: float
    kl: float


def w2_penalty(policy_logits: Tensor, reference_logits: Tensor, prototypes: Tensor) -> Tensor:
    """Return an upper bound of the squared 2-Wasserstein distance of two next-token distributions.

    In place of a KL divergence. Experimental: nobody has trained a large model with it.

    What both distributions give a token stays there, and what the policy has given up goes to what
    it has gained in proportion (the maximal coupling, its rest independent): with a = (p - r)+,
    b = (r - p)+ and their common sum t the bound is sum_jk a_j b_k |e_j - e_k| ** 2 / t. It is 0
    where the distributions agree, and exact where one of them is a Dirac or only two tokens differ.
    Where many tokens differ it is far above the distance, since each part goes to all that have
    gained. Two products of N x V x D multiplications instead of a transport problem.

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


def kl_penalty(policy_logits: Tensor, reference_logits: Tensor, prototypes: Tensor) -> Tensor:
    """Return KL(policy || reference) of each position `[N]`, whatever the prototypes."""
    policy = policy_logits.float().log_softmax(-1)
    reference = reference_logits.detach().float().log_softmax(-1)
    return (policy.exp() * (policy - reference)).sum(-1)


PENALTIES: dict[str, Penalty] = {"w2": w2_penalty, "kl": kl_penalty}


def train(
    model: Any,
    prompts: Tensor,
    word: int,
    *,
    penalty: str = "w2",
    weight: float = 0.1,
    steps: int = 30,
    group_size: int = 8,
    learning_rate: float = 1e-4,
) -> list[Step]:
    """Train `model` in place.

    Args:
        model: Generates, and maps token ids to logits.
        prompts: `[P, T]`, token ids without padding.
        word: Token id that continuations are to be near to.
        penalty: "w2" or "kl".
        weight: Of the penalty.
        steps: Updates.
        group_size: Samples of each prompt, at least 2.
        learning_rate: Of AdamW, over all parameters that are trained.

    Returns:
        What each step saw.

    Raises:
        ValueError: Groups of one sample, which has no advantage over others.
    """
    if group_size < 2:
        raise ValueError(f"group_size: expected at least 2, got {group_size}")
    reference = copy.deepcopy(model).requires_grad_(False).eval()
    prototypes = _prototypes(reference)  # [V, D]
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=learning_rate, weight_decay=0.0)
    model.eval()  # no dropout: the policy that is updated is the one that was sampled
    seen = []
    for _ in range(steps):
        samples = _sample(model, prompts.repeat_interleave(group_size, 0))
        answers = samples[:, prompts.shape[1] :]  # [P * G, T]
        rewards = (prototypes[answers] @ prototypes[word]).mean(-1)
        groups = rewards.view(-1, group_size)
        spread = groups.std(-1, keepdim=True) + 1e-4
        advantages = ((groups - groups.mean(-1, keepdim=True)) / spread).flatten()

        logits = _answer_logits(model, samples)  # [P * G * T, V]
        with torch.no_grad():
            held = _answer_logits(reference, samples)
        taken = F.cross_entropy(logits, answers.flatten(), reduction="none")
        gain = taken * advantages.repeat_interleave(NEW_TOKENS)
        found = {name: fn(logits, held, prototypes) for name, fn in PENALTIES.items()}
        (gain + weight * found[penalty]).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if isinstance(model, HarmonicForCausalLM):
            model.renormalize_prototypes_()
        seen.append(Step(rewards.mean().item(), *(found[n].mean().item() for n in PENALTIES)))
    return seen


def _prototypes(model: Any) -> Tensor:
    ours = isinstance(model, HarmonicForCausalLM)
    table = model.dist_head.prototypes if ours else model.get_input_embeddings().weight
    return F.normalize(table.detach().float(), dim=-1)


@torch.no_grad()
def _sample(model: Any, prompts: Tensor) -> Tensor:
    """Sample from the policy itself; `generate` would follow the model's own settings for it."""
    samples, new, cache = prompts, prompts, None
    for _ in range(NEW_TOKENS):
        outputs = model(input_ids=new, use_cache=True, **{CACHE: cache})
        cache = outputs[CACHE]
        new = outputs.logits[:, -1].float().softmax(-1).multinomial(1)
        samples = torch.cat([samples, new], 1)
    return samples


def _answer_logits(model: Any, samples: Tensor) -> Tensor:
    logits = model(input_ids=samples).logits[:, -NEW_TOKENS - 1 : -1]
    return logits.flatten(0, 1).float()


def main(arguments: Sequence[str] | None = None) -> list[Step]:
    """Run the loop and print what it saw.

    Raises:
        ValueError: WORD is not one token of the model's vocabulary.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="folder or Hub id of a causal language model")
    parser.add_argument("--word", default=" war", help="one token, with its blank")
    parser.add_argument("--penalty", choices=PENALTIES, default="w2")
    parser.add_argument("--weight", type=float, default=0.1)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--seed", type=int, default=42)
    options = parser.parse_args(arguments)
    tokenizer: Any = AutoTokenizer.from_pretrained(options.model)
    word = tokenizer(options.word, add_special_tokens=False).input_ids
    if len(word) != 1:
        raise ValueError(f"word: expected one token, got {options.word!r}, which is {len(word)}")
    rows = [tokenizer(text).input_ids for text in PROMPTS]
    shortest = min(map(len, rows))
    prompts = torch.tensor([row[:shortest] for row in rows])  # cut to the length of the shortest
    torch.manual_seed(options.seed)
    model: Any = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    seen = train(
        model,
        prompts,
        word[0],
        penalty=options.penalty,
        weight=options.weight,
        steps=options.steps,
        learning_rate=options.learning_rate,
    )
    shown = sorted({*range(0, len(seen), 5), len(seen) - 1})
    rows = [[index, *(f"{value:.4f}" for value in seen[index])] for index in shown]
    title = f"{options.weight} x {options.penalty}, near {options.word!r}"
    show_table(title, ["step", "reward, cosine", "W2, bound", "KL, nats"], rows)
    return seen


if __name__ == "__main__":
    main()
