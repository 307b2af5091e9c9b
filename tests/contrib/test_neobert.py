"""NeoBERT in transformers' own form (contrib/transformers) computes what ours computes."""

import importlib
import shutil
from pathlib import Path
from types import ModuleType

import pytest
import torch
import transformers.models
from safetensors.torch import load_file

from harmonic_sft import NeoBERTForMaskedLM
from tests.conftest import NEOBERT

ROOT = Path(__file__).parents[2]
CONTRIB = ROOT / "contrib" / "transformers"
BATCHES = ("inputs", "inputs_nopad")  # with padding and without


@pytest.fixture(scope="module")
def contributed() -> ModuleType:
    """The modeling file, imported as if it lay in transformers."""
    folder = str(CONTRIB / "src" / "transformers" / "models")
    transformers.models.__path__.append(folder)
    try:
        return importlib.import_module("transformers.models.neobert.modeling_neobert")
    finally:
        transformers.models.__path__.remove(folder)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@torch.no_grad()
def test_outputs_are_ours_to_the_bit(contributed, neobert_base, attention):
    theirs, report = contributed.NeoBertForMaskedLM.from_pretrained(
        neobert_base, attn_implementation=attention, output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    ours = NeoBERTForMaskedLM.from_pretrained(neobert_base, attn_implementation=attention)
    backbone = contributed.NeoBertModel.from_pretrained(neobert_base, attn_implementation=attention)
    for name in BATCHES:
        batch = load_file(NEOBERT / f"{name}.safetensors")
        expected = ours(**batch, labels=batch["input_ids"], output_hidden_states=True)
        got = theirs(**batch, labels=batch["input_ids"], output_hidden_states=True)
        assert torch.equal(got.loss, expected.loss)
        assert torch.equal(got.logits, expected.logits)
        pairs = zip(got.hidden_states, expected.hidden_states, strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)
        assert torch.equal(backbone(**batch).last_hidden_state, expected.hidden_states[-1])


@torch.no_grad()
def test_the_classifier_is_the_published_one(contributed, neobert_base):
    torch.manual_seed(0)
    model = contributed.NeoBertForSequenceClassification.from_pretrained(neobert_base, num_labels=3)
    ours = NeoBERTForMaskedLM.from_pretrained(neobert_base).model
    weights = model.state_dict()
    for name in BATCHES:
        batch = load_file(NEOBERT / f"{name}.safetensors")
        first = ours(**batch).last_hidden_state[:, 0]
        hidden = torch.tanh(first @ weights["dense.weight"].T + weights["dense.bias"])
        expected = hidden @ weights["classifier.weight"].T + weights["classifier.bias"]
        torch.testing.assert_close(model(**batch).logits, expected, rtol=0, atol=1e-6)


def test_a_checkout_names_the_model_in_every_list(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(CONTRIB)
    install = importlib.import_module("install")
    installed = Path(transformers.__file__).parent / "models"
    for name, *_ in install.LINES:
        if name.startswith("src"):
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(installed / Path(name).relative_to(install.MODELS), path)
    for _ in range(2):  # the second call changes nothing
        install.install(tmp_path)
        for name, start, _, line in install.LINES:
            if name.startswith("src"):
                text = (tmp_path / name).read_text()
                assert text.count(line) == 1, start
    assert (tmp_path / install.MODELS / "neobert" / "modeling_neobert.py").is_file()
    tables = (tmp_path / install.MODELS / "auto" / "modeling_auto.py").read_text()
    masked = tables.split("MODEL_FOR_MASKED_LM_MAPPING_NAMES = ")[1].split("\n)\n")[0]
    assert '("neobert", "NeoBertForMaskedLM"),\n' in masked
    with pytest.raises(ValueError, match="checkout: expected a folder with src/transformers"):
        install.install(tmp_path / "docs")
    with pytest.raises(ValueError, match="expected a list after it, got none"):
        install.inserted("nothing", "^start", "^(entry)", "entry\n")
