"""The linear head ranks as the distance head did, and loads where only transformers is."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from harmonic_sft.hub import linear_export
from harmonic_sft.hub.linear_export import export_linear, linear_head
from harmonic_sft.models import (
    HarmonicForCausalLM,
    HarmonicForMaskedLM,
    HarmonicForSequenceClassification,
)
from tests import decoders
from tests.encoders import SIZES, V, save_bert_tokenizer
from tests.head_variants import VARIANTS, moved_head
from tests.saved_models import change_weights, spoil_embeddings

D = SIZES["hidden_size"]
HEADS = {
    "sphere": {"name": "dist", "h_exp": -6.0},
    "euclid": {"name": "dist", "unit_sphere": False},
    "linear": {"name": "linear"},
    "linear without bias": {"name": "linear", "bias": False},
}
# Two tokens are ranked if their halved squared distances differ by more than this share of
# |x|^2 + |w|^2; rounding to float32 (2^-24) of dot products over 32 dimensions stays far below.
MARGIN = 1e-5


@torch.no_grad()
def trained(base: Path, folder: Path, head: str, dtype=torch.float32, **options) -> Path:
    """A saved model whose prototypes are of very different norms, as after some training."""
    model = HarmonicForMaskedLM.from_base(str(base), head=HEADS[head], dtype=dtype, **options)
    generator = torch.Generator().manual_seed(1)
    norms = torch.rand(V, 1, generator=generator) + 0.5
    rows = torch.randn(V, D, generator=generator)
    if head == "sphere":  # further off it they would be refused
        rows = rows / rows.norm(dim=-1, keepdim=True)
    model.dist_head.weight.copy_(rows * norms)
    if head == "linear":
        model.dist_head.bias.normal_()
    model.save_pretrained(folder)
    return folder


def inputs():
    return {"input_ids": torch.randint(5, V, (3, 12), generator=torch.Generator().manual_seed(2))}


def float64_scores(head: str, weights: dict, hidden_states: torch.Tensor) -> torch.Tensor:
    """What the head of the trained model ranks by, pair by pair, `[N, V]`."""
    states, rows = hidden_states.double(), weights["dist_head.weight"].double()
    if head == "sphere":
        states = states / states.square().sum(-1, keepdim=True).sqrt()
        rows = rows / rows.square().sum(-1, keepdim=True).sqrt()
    if head.startswith("linear"):
        return torch.stack([rows @ x for x in states]) + weights.get("dist_head.bias", 0)
    return torch.stack([-(rows - x).square().sum(-1) / 2 for x in states])


@pytest.mark.parametrize(
    ("family", "head", "dtype"),
    [
        ("bert", "sphere", torch.float32),
        ("bert", "euclid", torch.bfloat16),
        ("bert", "linear", torch.float32),
        ("neobert", "linear without bias", torch.bfloat16),
        ("neobert", "sphere", torch.bfloat16),
    ],
)
def test_all_tokens_are_ranked_as_before(bases, tmp_path, family, head, dtype):
    folder = trained(bases / family, tmp_path / "model", head, dtype)
    assert export_linear(folder, tmp_path / "linear") == tmp_path / "linear"
    old = HarmonicForMaskedLM.from_pretrained(folder)
    bias = head in ("euclid", "linear")
    file = load_file(tmp_path / "linear" / "linear_head.safetensors")
    assert {name: (list(t.shape), t.dtype) for name, t in file.items()} == {
        "weight": ([V, D], torch.float32),
        **({"bias": ([V], torch.float32)} if bias else {}),
    }
    hidden_states = old.model(**inputs()).last_hidden_state.flatten(0, 1)  # [N, D]
    weights = load_file(folder / "model.safetensors")
    scores = float64_scores(head, weights, hidden_states)
    logits = F.linear(hidden_states.float(), file["weight"], file.get("bias"))
    sizes = scores.abs().amax(-1) if head != "sphere" else torch.ones(len(scores))
    gaps = scores[:, :, None] - scores[:, None, :]  # [N, V, V]
    apart = gaps > MARGIN * 2 * sizes[:, None, None]
    assert apart.sum() > 0.49 * gaps.numel()  # of at most half: each pair stands there twice
    assert ((logits[:, :, None] > logits[:, None, :]) | ~apart).all()
    if head.startswith("linear"):
        assert torch.equal(logits, old(**inputs()).logits.flatten(0, 1))
    text = (tmp_path / "linear" / "README.md").read_text()
    assert ("probabilities" in text) == ("linear" not in head)
    assert ('"unit_sphere": true' in text) == (head == "sphere")
    assert ("rounded to float32" in text) == ("linear" not in head)
    assert f"The base is {family}. Its license, and that of the trained model, hold" in text


def test_the_tokenizer_goes_with_it_and_nothing_private(bases, tmp_path):
    folder = trained(bases / "bert", tmp_path / "model", "sphere")
    save_bert_tokenizer(folder)
    (folder / "training_args.bin").write_bytes(b"secret")
    (folder / "optimizer.pt").write_bytes(b"state")
    target = export_linear(folder, tmp_path / "linear")
    names = {path.name for path in target.iterdir()}
    tokenizer = {"tokenizer.json", "tokenizer_config.json"}
    assert names == {"linear_head.safetensors", "README.md", *tokenizer}
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (target / name).read_bytes() == (folder / name).read_bytes()
    for path in target.iterdir():
        assert str(tmp_path).encode() not in path.read_bytes(), path.name


@pytest.mark.parametrize("is_causal", [False, True])
def test_an_export_names_the_base_and_no_code_of_it(bases, causal_base, tmp_path, is_causal):
    model_class, base = (HarmonicForMaskedLM, bases / "bert")
    if is_causal:
        model_class, base = HarmonicForCausalLM, causal_base
    model = model_class.from_base(str(base), head=HEADS["sphere"])
    code = {"AutoConfig": "other/repo--code.C", "AutoModelForCausalLM": "other/repo--code.M"}
    model.config.text_config.auto_map = code
    model.config.text_config.custom_pipelines = {"mine": {"impl": "other/repo--code.P"}}
    model.config.base_model, model.config.base_revision = "me/base", "a" * 40
    model.save_pretrained(tmp_path / "model")
    target = export_linear(tmp_path / "model", tmp_path / "linear")
    card = (target / "README.md").read_text()
    assert "other/repo" not in "".join([card, *(p.read_text() for p in target.glob("*.json"))])
    assert f"The base is me/base at commit {'a' * 40}. Its license, and that" in card
    assert ("`linear_head.safetensors` holds the head alone" in card) != is_causal


def test_a_soft_cap_that_the_target_has_not_is_told(causal_base, tmp_path):
    head = {"name": "linear", "bias": False, "softcap": 2.0}
    model = HarmonicForCausalLM.from_base(str(causal_base), head=head).eval()
    with torch.no_grad():
        model.dist_head.weight.mul_(50)
    model.save_pretrained(tmp_path / "model")
    target = export_linear(tmp_path / "model", tmp_path / "linear")
    exported = AutoModelForCausalLM.from_pretrained(target).eval()
    with torch.no_grad():
        before, after = model(**inputs()).logits, exported(**inputs()).logits
    assert not torch.equal(before, after)
    assert "**Only the order of the tokens\nis kept**" in (target / "README.md").read_text()


@torch.no_grad()
def test_weights_that_blocks_share_are_exported_with_each_of_them(tmp_path):
    options = {"num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid"] * 2}
    options["use_mamba_kernels"] = False  # transformers 5.10 would refuse a CPU
    decoders.save_decoder("zamba", tmp_path / "base", **options)
    model = HarmonicForCausalLM.from_base(str(tmp_path / "base"), head=HEADS["linear without bias"])
    model.save_pretrained(tmp_path / "model")
    export_linear(tmp_path / "model", tmp_path / "linear")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "linear").eval()
    torch.testing.assert_close(exported(**inputs()).logits, model.eval()(**inputs()).logits)


FOLDED = (
    "linear",
    "linear without bias",
    "dist",
    "dist off the sphere",
    "dist learned",
    "dist mahalanobis off the sphere",
    "cosine",
    "cosine fixed",
    "vmf",
    "l2",
    "l2 fixed",
    "rotation",
    "rotation of dist",
)


class Tables(TorchDispatchMode):
    """Counts tensors of float64 that are as large as the prototypes."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **kwargs or {})
        self.count += isinstance(found, torch.Tensor) and found.nbytes >= 8 * V * D
        return found


@pytest.mark.parametrize("name", FOLDED)
def test_whatever_is_linear_in_the_end_is_folded_into_the_rows(name, monkeypatch):
    monkeypatch.setattr(linear_export, "ROWS", 7)
    head = moved_head(name, hidden_size=D, vocab_size=V)
    states = 3 * torch.randn(20, D, dtype=torch.float64)
    with Tables() as tables:
        linear = linear_head(head)
    if name in ("dist", "dist off the sphere"):
        assert tables.count == 1, "a table of 128,256 x 4,096 is 4 GiB"
    linear = linear.double()
    torch.testing.assert_close(
        linear(states).argsort(-1), head.double()(states).argsort(-1), rtol=0, atol=0
    )


@pytest.mark.parametrize("name", sorted(VARIANTS.keys() - set(FOLDED)))
def test_whatever_is_not_is_refused(name):
    """Mixtures, other metrics, a bias beside normalized states (mahalanobis, vmf per class)."""
    message = "head: expected one that ranks by dot products or Euclidean distances"
    with pytest.raises(ValueError, match=message):
        linear_head(moved_head(name))


def test_a_folder_that_is_no_whole_harmonic_model_is_an_error(bases, tmp_path):
    target = tmp_path / "linear"
    for folder in (tmp_path / "missing", tmp_path):
        with pytest.raises(ValueError, match=r"folder: expected a saved model \(config.json and"):
            export_linear(folder, target)
    with pytest.raises(ValueError, match="folder: expected a harmonic language model, got a Bert"):
        export_linear(bases / "bert", target)
    tokens = [str(number) for number in range(V)]  # as many classes as tokens: it would fit
    classifier = HarmonicForSequenceClassification.from_base(str(bases / "bert"), labels=tokens)
    classifier.save_pretrained(tmp_path / "classifier")
    with pytest.raises(ValueError, match="harmonic language model, got a HarmonicForSequence"):
        export_linear(tmp_path / "classifier", target)
    folder = trained(bases / "bert", tmp_path / "model", "sphere")
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text("[]")
    with pytest.raises(ValueError, match=r"config\.json: expected a JSON object, got list"):
        export_linear(folder, target)
    (folder / "config.json").write_text(config)
    change_weights(folder / "model.safetensors", lambda weights: weights.pop("dist_head.weight"))
    with pytest.raises(ValueError, match=r"got 1 weights missing: dist_head\.weight"):
        export_linear(folder, target)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="folder: expected a saved model"):
        export_linear(folder, target)
    assert not target.exists()


def test_a_head_that_predicts_nothing_is_not_exported(bases, tmp_path):
    folder = trained(bases / "bert", tmp_path / "model", "sphere")
    path = folder / "model.safetensors"
    change_weights(path, lambda weights: weights["dist_head.weight"].fill_(0.1))
    with pytest.raises(ValueError, match=r"export: .* got one of which all prototypes are equal"):
        export_linear(folder, tmp_path / "linear")
    assert not (tmp_path / "linear").exists()


def test_weights_that_are_not_finite_are_not_exported(bases, tmp_path):
    folder = trained(bases / "bert", tmp_path / "model", "sphere")
    name = spoil_embeddings(folder / "model.safetensors")
    with pytest.raises(ValueError, match=f"export: expected finite numbers, got others in {name}"):
        export_linear(folder, tmp_path / "linear")


def test_a_target_that_cannot_be_written_is_refused_before_anything_is_loaded(tmp_path):
    with pytest.raises(
        ValueError, match="--output: expected a folder that can be made, got '/dev/nu"
    ):
        export_linear(tmp_path / "nothing", Path("/dev/null/out"))


def test_a_target_in_use_is_left_alone(bases, tmp_path):
    folder = trained(bases / "bert", tmp_path / "model", "sphere")
    before = {path: path.read_bytes() for path in folder.iterdir()}
    (tmp_path / "file").write_text("mine")
    for target in (folder, tmp_path / "file"):
        with pytest.raises(ValueError, match="--output: expected an empty folder or none, got '/"):
            export_linear(folder, target)
    assert {path: path.read_bytes() for path in folder.iterdir()} == before
    (tmp_path / "empty").mkdir()
    for target in (tmp_path / "empty", tmp_path / "deep" / "new"):
        export_linear(folder, target)
        assert (target / "linear_head.safetensors").is_file()
        assert target.stat().st_mode == folder.stat().st_mode


def test_what_fails_halfway_leaves_nothing(bases, tmp_path, monkeypatch):
    folder = trained(bases / "bert", tmp_path / "model", "sphere")

    def fail(*_args, **_kwargs):
        raise OSError("no space left on device")

    monkeypatch.setattr(linear_export, "save_file", fail)
    with pytest.raises(OSError, match="no space left"):
        export_linear(folder, tmp_path / "linear")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
