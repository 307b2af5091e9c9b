"""Every head, trained and saved, computes the same where only torch and transformers are."""

import pytest
import torch

from harmonic_sft.hub.model_card import HEAD_KINDS
from harmonic_sft.models import HEADS, HarmonicForMaskedLM
from tests.encoders import V
from tests.head_variants import VARIANTS
from tests.saved_models import write_partial

# With a learned matrix of their own, or with one weight for several heads.
PARTIAL = ("rotation", "multi_head")
INPUTS = {"input_ids": torch.randint(5, V, (2, 9), generator=torch.Generator().manual_seed(1))}


@pytest.fixture
def base(bases, cache_repo):
    """A base in the cache of the Hub, where a checkpoint of trained parts finds it."""
    cache_repo("me/heads", bases / "bert")
    return "me/heads"


def trained(base, head):
    """A model after one step of training its last block and its head."""
    model = HarmonicForMaskedLM.from_base(base, head=head)
    names = [n for n, _ in model.named_parameters() if ".layer.2." in n or "dist_head" in n]
    parameters = [model.get_parameter(name) for name in names]
    model.config.trained_parameters = names
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    model(**INPUTS, labels=INPUTS["input_ids"]).loss.backward()
    optimizer.step()
    model.renormalize_prototypes_()
    return model


def test_the_card_has_words_for_every_head():
    assert HEAD_KINDS.keys() == HEADS.keys() - {"transform"}  # it has those of the head inside it


def test_every_head_loads_where_this_package_is_not(base, tmp_path, check_elsewhere):
    first = {head["name"]: name for name, head in reversed(VARIANTS.items())}
    for name in sorted({*first.values(), *PARTIAL}):
        model = trained(base, VARIANTS[name])
        full = check_elsewhere.add(name, model, **INPUTS)
        if name in PARTIAL:
            write_partial(full, tmp_path / f"{name} part")
            check_elsewhere.add(f"{name} part", model, **INPUTS)
    check_elsewhere.run()
