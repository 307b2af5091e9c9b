"""Documents in one row, in a padded batch and alone have the same hidden states and losses."""

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import CONFIG_MAPPING, AutoConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from harmonic_sft.data.batches import PaddingCollator, collate_padding_free, join_rows
from harmonic_sft.data.masking import IGNORE_INDEX
from harmonic_sft.models import HarmonicConfig, HarmonicForMaskedLM
from harmonic_sft.models.document_attention import PACKABLE

V = 120
SIZES = {
    "vocab_size": V,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 40,
    "pad_token_id": 1,
    "bos_token_id": 2,
    "eos_token_id": 3,
}
OWN_SIZES = {
    "albert": {"embedding_size": 32},
    "distilbert": {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48},
    "electra": {"embedding_size": 32},
    "eurobert": {"num_key_value_heads": 4, "mask_token_id": 4},
    # One layer sees everything, the other 3 tokens to each side.
    "modernbert": {
        "cls_token_id": 2,
        "sep_token_id": 3,
        "local_attention": 6,
        "global_attn_every_n_layers": 2,
    },
}
LENGTHS = (7, 30, 11, 1, 13)
PACKS = ([1, 4], [0, 2, 3])  # of 43 and 19 tokens: one is longer than the models' 40 positions
CASES = [  # every pair of two of them
    (family, attention, ("packed", "padding-free")[(row + column) % 2])
    for row, family in enumerate(PACKABLE)
    for column, attention in enumerate(("sdpa", "eager", "flash"))
]


def make_model(family: str, attention: str = "sdpa") -> HarmonicForMaskedLM:
    torch.manual_seed(0)
    if family == "neobert":
        config = AutoConfig.for_model("neobert", **SIZES)
    else:
        config = CONFIG_MAPPING[family](**SIZES, **OWN_SIZES.get(family, {}))
    model = HarmonicForMaskedLM(HarmonicConfig(text_config=config, head={"name": "linear"}))
    for parameter in model.parameters():  # large enough for a leak to show
        torch.nn.init.normal_(parameter, std=0.3)
    model.model.backbone.config._attn_implementation = attention
    return model.eval()


def attend_by_boundaries(module, query, key, value, attention_mask, scaling=None, **kwargs):
    """What flash attention does with documents, in plain torch."""
    assert attention_mask is None
    boundaries = kwargs["cu_seq_lens_q"].tolist()
    assert torch.equal(kwargs["cu_seq_lens_q"], kwargs["cu_seq_lens_k"])
    assert kwargs["max_length_q"] == kwargs["max_length_k"] == kwargs["cu_seq_lens_q"].diff().max()
    batch_size, window = len(query), kwargs.get("sliding_window")
    query, key, value = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    output = torch.empty_like(query)  # [B * T, H, D / H]
    for start, stop in itertools.pairwise(boundaries):
        q, k, v = (x[start:stop].transpose(0, 1) for x in (query, key, value))
        steps = torch.arange(stop - start)
        # transformers hands over one more than the steps to each side.
        seen = (steps[:, None] - steps).abs() < (window or stop)
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scaling)
        output[start:stop] = attended.transpose(0, 1)
    return output.unflatten(0, (batch_size, -1)), None


@pytest.fixture(autouse=True)
def flash(monkeypatch):
    """A stand-in for a kernel that is not for CPUs; transformers knows it by its name."""
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "flash_loop", attend_by_boundaries)


@pytest.fixture(scope="module")
def documents() -> list[dict[str, np.ndarray]]:
    generator = np.random.default_rng(0)
    rows = []
    for length in LENGTHS:
        input_ids = generator.integers(5, V, size=length)
        labels = np.where(generator.random(length) < 0.4, input_ids, IGNORE_INDEX)
        rows.append({"input_ids": input_ids, "labels": labels})
    return rows


def batches(documents: list[dict[str, np.ndarray]]) -> dict[str, dict[str, Tensor]]:
    packs = [join_rows([documents[index] for index in members]) for members in PACKS]
    collator = PaddingCollator(pad_token_id=SIZES["pad_token_id"], pad_to_multiple_of=16)
    return {"packed": collator(packs), "padding-free": collate_padding_free(packs)}


def alone(model: HarmonicForMaskedLM, documents: list[dict[str, np.ndarray]]) -> Tensor:
    """The hidden states of every document alone, in the order of the packs."""
    model.model.backbone.config._attn_implementation = "eager"
    order = [documents[index] for members in PACKS for index in members]
    rows = [torch.from_numpy(row["input_ids"])[None] for row in order]
    return torch.cat([model.model(input_ids).last_hidden_state[0] for input_ids in rows])


@pytest.mark.parametrize(("family", "attention", "form"), CASES)
@torch.no_grad()
def test_a_document_is_the_same_in_company(family, attention, form, documents):
    model = make_model(family)
    expected = alone(model, documents)
    model.model.backbone.config._attn_implementation = attention.replace("flash", "flash_loop")
    inputs = batches(documents)[form]
    inputs.pop("labels")
    states = model.model(**inputs).last_hidden_state
    assert states.isfinite().all()
    kept = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])) == 1
    torch.testing.assert_close(states[kept], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["bert", "roberta", "neobert", "modernbert"])
def test_losses_and_gradients_are_those_of_the_padded_batch(family, attention, documents):
    model = make_model(family, attention)
    padded = PaddingCollator(pad_token_id=SIZES["pad_token_id"])(documents)

    def loss_and_gradients(inputs):
        model.zero_grad()
        loss = model(**inputs).loss
        loss.backward()
        used = (p.grad for p in model.parameters() if p.grad is not None)
        return loss.detach(), torch.cat([gradient.flatten() for gradient in used])

    expected = loss_and_gradients(padded)
    for inputs in batches(documents).values():
        loss, gradients = loss_and_gradients(inputs)
        torch.testing.assert_close(loss, expected[0], rtol=0, atol=1e-5)
        torch.testing.assert_close(gradients, expected[1], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("family", ["bert", "roberta", "neobert", "modernbert"])
@torch.no_grad()
def test_positions_of_whole_rows_are_those_counted_by_default(family, documents):
    model = make_model(family)
    batch = PaddingCollator(pad_token_id=SIZES["pad_token_id"])(documents)
    batch.pop("labels")
    kept = batch["attention_mask"] == 1
    default = model.model(**batch).last_hidden_state[kept]
    position_ids = torch.arange(batch["input_ids"].shape[1])[None]
    given = model.model(**batch, position_ids=position_ids).last_hidden_state[kept]
    torch.testing.assert_close(given, default, rtol=0, atol=1e-6)
    embedded = model.get_input_embeddings()(batch.pop("input_ids"))
    given = model.model(inputs_embeds=embedded, **batch, position_ids=position_ids)
    torch.testing.assert_close(given.last_hidden_state[kept], default, rtol=0, atol=1e-6)


@pytest.mark.parametrize("family", PACKABLE)
@torch.no_grad()
def test_a_mask_of_pairs_is_the_callers_own_and_a_leak_would_show(family, documents):
    model = make_model(family)
    packed = join_rows([documents[index] for index in PACKS[1]])
    input_ids, position_ids = (
        torch.from_numpy(packed[name])[None] for name in ("input_ids", "position_ids")
    )
    all_pairs = torch.ones(1, 1, input_ids.shape[1], input_ids.shape[1], dtype=torch.bool)
    leaking = model.model(input_ids, all_pairs, position_ids=position_ids).last_hidden_state
    blocks = model.model(input_ids, position_ids=position_ids).last_hidden_state
    assert (leaking - blocks).abs().max() > 0.01  # a thousand times the tolerance above


@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_a_document_longer_than_the_model_is_refused(family):
    model = make_model(family)
    offset = 2 if family == "roberta" else 0
    position_ids = torch.cat([torch.arange(41 - offset), torch.arange(3)])[None]
    message = f"position_ids: expected documents of at most {40 - offset} tokens, got one of"
    with pytest.raises(ValueError, match=message):
        model(torch.full(position_ids.shape, 7), position_ids=position_ids)


def test_a_backbone_that_would_mix_documents_is_refused():
    model = make_model("roformer")
    input_ids, whole = torch.full((2, 6), 7), torch.arange(6)[None]
    assert torch.equal(
        model(input_ids, position_ids=whole).logits, model(input_ids).logits
    )  # it counts for itself and takes no positions
    with pytest.raises(ValueError, match="expected positions counted from 0, because a backbone"):
        model(input_ids, position_ids=whole + 1)
    with pytest.raises(ValueError, match="expected one document per row for a backbone of type"):
        model(input_ids, position_ids=whole % 3)
