"""Every head, trained and saved, computes the same where only torch and transformers are."""

import os
import shutil
from pathlib import Path

import pytest
import torch
from transformers import BertConfig, BertForMaskedLM

from harmonic_sft.hub.model_card import HEAD_KINDS
from harmonic_sft.models import HEADS, HarmonicForMaskedLM
from tests.head_variants import VARIANTS, D, V
from tests.models.test_modeling_backbone import cache_repo, write_partial

# With a learned matrix of their own, or with one weight for several heads.
PARTIAL = ("rotation", "multi_head")
INPUTS = {"input_ids": torch.randint(5, V, (2, 9), generator=torch.Generator().manual_seed(1))}
READER = """
import sys, torch
from pathlib import Path
from transformers import AutoModelForMaskedLM
for folder in sorted(Path("models").iterdir()):
    options = {"trust_remote_code": True, "cache_dir": sys.argv[1]}  # where the base is
    model = AutoModelForMaskedLM.from_pretrained(str(folder), **options)
    expected = torch.load(Path("expected") / folder.name, weights_only=True)
    logits = model(input_ids=expected["input_ids"]).logits
    assert torch.equal(logits, expected["logits"]), folder.name
    assert model.h_exp == expected["h_exp"], folder.name
    assert model.dist_head.weight.dtype == torch.float32
    sys.stdout.write(folder.name + "\\n")
"""


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A base in the cache of the Hub, where a checkpoint of trained parts finds it."""
    folder = tmp_path_factory.mktemp("bases") / "bert"
    torch.manual_seed(0)
    sizes = {"hidden_size": D, "num_attention_heads": 4, "intermediate_size": 32}
    config = BertConfig(vocab_size=V, num_hidden_layers=2, max_position_embeddings=16, **sizes)
    BertForMaskedLM(config).save_pretrained(folder)
    cache = Path(os.environ["HF_HUB_CACHE"])
    cache.mkdir(exist_ok=True)
    cache_repo("me/heads", folder)
    yield "me/heads"
    shutil.rmtree(cache / "models--me--heads")


def trained(base, head, **options):
    """A model after one step of training its last block and its head."""
    model = HarmonicForMaskedLM.from_base(base, head=head, **options)
    names = [n for n, _ in model.named_parameters() if ".layer.1." in n or "dist_head" in n]
    parameters = [model.get_parameter(name) for name in names]
    model.config.trained_parameters = names
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    model(**INPUTS, labels=INPUTS["input_ids"]).loss.backward()
    optimizer.step()
    model.renormalize_prototypes_()
    return model


@torch.no_grad()
def expect(model, path):
    path.parent.mkdir(exist_ok=True)
    logits = model(**INPUTS).logits
    assert logits.isfinite().all()
    torch.save({**INPUTS, "logits": logits, "h_exp": model.dist_head.h_exp}, path)


def test_the_card_has_words_for_every_head():
    assert HEAD_KINDS.keys() == HEADS.keys()


def test_every_head_loads_where_this_package_is_not(base, tmp_path, elsewhere):
    first = {head["name"]: name for name, head in reversed(VARIANTS.items())}
    for number, name in enumerate({*first.values(), *PARTIAL}):
        head = VARIANTS[name]
        model = trained(base, head)
        folder = f"{number}_{head['name']}"
        model.save_pretrained(tmp_path / "models" / folder)
        expect(model, tmp_path / "expected" / folder)
        if name in PARTIAL:
            write_partial(tmp_path / "models" / folder, tmp_path / "models" / f"{folder}_part")
            expect(model, tmp_path / "expected" / f"{folder}_part")
    found = elsewhere(READER, os.environ["HF_HUB_CACHE"], cwd=tmp_path).split()
    assert {path.name for path in (tmp_path / "models").iterdir()} <= set(found)


def test_what_was_trained_completes_its_base_in_16_bits(base, tmp_path):
    model = trained(base, VARIANTS["rotation of multi_head"], dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "full")
    write_partial(tmp_path / "full", tmp_path / "part")
    found = HarmonicForMaskedLM.from_pretrained(tmp_path / "part")
    for key, tensor in model.state_dict().items():
        assert found.state_dict()[key].dtype == tensor.dtype, key
        assert torch.equal(found.state_dict()[key], tensor), key
    with torch.no_grad():
        assert torch.equal(found(**INPUTS).logits, model(**INPUTS).logits)
