"""Harmonic models around every encoder family: wrapping, saving, loading without the package."""

import json
import math
import re
import shutil

import pytest
import torch
from datasets import Dataset
from transformers import (
    AutoModel,
    AutoModelForMaskedLM,
    BertConfig,
    BloomConfig,
    ElectraConfig,
    ElectraForMaskedLM,
    GPT2Config,
    RobertaConfig,
    T5Config,
    Trainer,
    TrainingArguments,
)

from harmonic_sft.models import (
    HarmonicConfig,
    HarmonicForMaskedLM,
    HarmonicForSequenceClassification,
    HarmonicModel,
    find_blocks,
    max_positions,
)
from tests.encoders import FAMILIES, SIZES, V, save_bert_tokenizer, save_encoder
from tests.saved_models import change_weights


def batch(seed=0):
    generator = torch.Generator().manual_seed(seed)
    input_ids = torch.randint(5, V, (3, 12), generator=generator)
    attention_mask = torch.ones_like(input_ids)
    attention_mask[1, 8:] = 0
    labels = torch.where(torch.rand(3, 12, generator=generator) < 0.4, input_ids, -100)
    labels[1, 8:] = -100
    return {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}


def test_layers_that_go_with_the_old_head_are_named(bases, tmp_path, caplog):
    model = HarmonicForMaskedLM.from_base(str(bases / "bert"), head={"name": "dist"})
    assert f"base {bases / 'bert'}: its own head also has a dense layer and a norm" in caplog.text
    assert "To keep them write head: {name: transform, inner: {name: dist, ...}}" in caplog.text
    model.save_pretrained(tmp_path / "ours")  # which has none
    for name in ("cosine", "rotation"):
        own = HarmonicForMaskedLM.from_base(str(bases / "bert"), head={"name": name})
        own.save_pretrained(tmp_path / name)
    AutoModel.from_pretrained(bases / "bert").save_pretrained(tmp_path / "body")
    caplog.clear()
    for name in ("ours", "cosine", "rotation", "body"):
        HarmonicForMaskedLM.from_base(tmp_path / name)
    assert "own head" not in caplog.text
    with pytest.raises(ValueError, match=r"that ends in a linear layer, got none\. Use"):
        HarmonicForMaskedLM.from_base(tmp_path / "body", init="output_embeddings")


@pytest.mark.parametrize("family", FAMILIES)
def test_backbone_is_the_base_and_prototypes_its_embeddings(bases, family):
    model = HarmonicForMaskedLM.from_base(str(bases / family))
    inputs = batch()
    inputs.pop("labels")
    base = AutoModelForMaskedLM.from_pretrained(bases / family)
    expected = base(**inputs, output_hidden_states=True).hidden_states[-1]
    actual = model.model(**inputs).last_hidden_state
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    embeddings = base.get_input_embeddings().weight
    filled = embeddings.norm(dim=-1) > 0  # the padding row may be empty
    torch.testing.assert_close(
        model.dist_head.weight[filled], torch.nn.functional.normalize(embeddings, dim=-1)[filled]
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_labelled_positions_alone_reach_the_head(bases, family):
    model = HarmonicForMaskedLM.from_base(str(bases / family))
    inputs = batch()
    seen = []

    def loss_fn(head, hidden_states, labels):
        seen.append(len(hidden_states))
        return head.nll(hidden_states, labels)

    model.loss_fn = loss_fn
    output = model(**inputs, output_logits=False)
    assert output.logits is None
    assert seen == [int((inputs["labels"] != -100).sum())]
    asked = model(**inputs)  # not in training mode
    labels = inputs["labels"]
    expected = torch.nn.functional.cross_entropy(asked.logits.flatten(0, 1), labels.flatten())
    torch.testing.assert_close(output.loss, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(asked.loss, output.loss)
    inputs.pop("labels")
    assert torch.equal(model(**inputs).logits, asked.logits)
    assert model.train()(**batch()).logits is None
    assert model(**batch(), output_logits=True).logits.shape == asked.logits.shape


FILLER = """
import json, sys
from transformers import pipeline
fill = pipeline("fill-mask", model=sys.argv[1], trust_remote_code=True)
print(json.dumps(fill("w0 [MASK] w1")))
"""


def test_published_folder_needs_no_package(bases, check_elsewhere, elsewhere):
    """Bit-equal logits, backbone and pipeline in a process that cannot import harmonic_sft."""
    inputs = {key: value for key, value in batch().items() if key != "labels"}
    for family in FAMILIES:
        dtype = torch.bfloat16 if family == "neobert" else torch.float32
        model = HarmonicForMaskedLM.from_base(str(bases / family), dtype=dtype)
        model.h_exp = -6.5
        path = check_elsewhere.add(family, model, **inputs)
        text = (path / "config.json").read_text()
        assert str(bases) not in text  # a local path is nobody's business
        saved = json.loads(text)
        assert saved["head"].get("inner", saved["head"])["h_exp"] == -6.5
        assert saved["base_model"] == family
        tasks = ("MaskedLM", "QuestionAnswering", "SequenceClassification", "TokenClassification")
        autos = {"AutoConfig", "AutoModel", *map("AutoModelFor{}".format, tasks)}
        assert set(saved["auto_map"]) == autos
        assert not list(path.glob("_*"))
    check_elsewhere.run()
    bert = check_elsewhere.paths[0]
    save_bert_tokenizer(bert)
    filled = json.loads(elsewhere(FILLER, bert).splitlines()[-1])
    row = torch.tensor([[2, 5, 4, 6, 3]])
    logits = HarmonicForMaskedLM.from_pretrained(bert)(input_ids=row).logits
    probabilities = logits[0, 2].softmax(-1)
    best = int(probabilities.argmax())
    assert filled[0]["token"] == best
    assert filled[0]["score"] == pytest.approx(probabilities[best].item(), rel=1e-5)


def test_the_backbone_alone_claims_no_head(bases, tmp_path):
    """Saved again, it must not load as a masked model with a random head."""
    HarmonicForMaskedLM.from_base(str(bases / "bert")).save_pretrained(tmp_path / "whole")
    HarmonicModel.from_pretrained(tmp_path / "whole").save_pretrained(tmp_path / "backbone")
    saved = json.loads((tmp_path / "backbone" / "config.json").read_text())
    assert set(saved["auto_map"]) == {"AutoConfig", "AutoModel"}


def test_an_exponent_is_below_zero_and_of_a_distance_head(bases, tmp_path):
    model = HarmonicForMaskedLM.from_base(str(bases / "bert"))
    with pytest.raises(ValueError, match="h_exp: expected a number below 0, got 3"):
        model.h_exp = 3.0
    model.dist_head.h_exp = -5.5
    model.save_pretrained(tmp_path)
    assert HarmonicConfig.from_pretrained(tmp_path).h_exp == -5.5
    assert HarmonicForMaskedLM.from_pretrained(tmp_path).dist_head.inner.h_exp == -5.5
    steeper = HarmonicForMaskedLM.from_pretrained(tmp_path, h_exp=-11.0)
    inputs = batch()
    with torch.no_grad():
        logits, twice = model(**inputs).logits, steeper(**inputs).logits
    torch.testing.assert_close(twice, 2 * logits)
    with pytest.raises(ValueError, match="h_exp: expected a number below 0, got 3"):
        HarmonicForMaskedLM.from_pretrained(tmp_path, h_exp=3.0)
    assert HarmonicConfig(head={"name": "rotation", "inner": None}).h_exp is None
    linear = HarmonicForMaskedLM.from_base(str(bases / "bert"), head={"name": "linear"})
    with pytest.raises(ValueError, match="h_exp: expected a dist head, got linear"):
        linear.h_exp = -3.0


CHANGES = {
    "missing": lambda weights, key: weights.pop(key),
    "of another shape": lambda weights, key: weights.update({key: weights[key][..., :-1].clone()}),
    "not used": lambda weights, key: weights.update(
        {key.replace(".1.", ".7."): weights[key].clone()}
    ),
}


@pytest.mark.parametrize(
    ("problem", "family", "key"),
    [
        ("missing", "bert", "bert.encoder.layer.1.output.dense.weight"),
        ("of another shape", "neobert", "model.transformer_encoder.1.wo.weight"),
        ("not used", "modernbert", "model.layers.1.mlp.Wo.weight"),
    ],
)
def test_a_base_that_does_not_fill_the_backbone_is_an_error(bases, tmp_path, problem, family, key):
    folder = shutil.copytree(bases / family, tmp_path / "damaged")
    change_weights(folder / "model.safetensors", lambda weights: CHANGES[problem](weights, key))
    message = f"base .*: expected a checkpoint that fills the backbone, got 1 weights {problem}: "
    with pytest.raises(ValueError, match=message):
        HarmonicForMaskedLM.from_base(str(folder))


@pytest.mark.parametrize("damage", ["empty", "cut", "header"])
def test_damaged_weights_are_an_error_that_names_the_file(bases, tmp_path, damage):
    HarmonicForMaskedLM.from_base(str(bases / "bert")).save_pretrained(tmp_path / "ours")
    shutil.copytree(bases / "bert", tmp_path / "bert")
    for path in tmp_path.glob("*/model.safetensors"):
        whole = path.read_bytes()
        header = whole[:20] + b"\xff" + whole[21:]
        path.write_bytes({"empty": b"", "cut": whole[:-1], "header": header}[damage])
    for name, load in (
        ("ours", HarmonicForMaskedLM.from_pretrained),
        ("ours", HarmonicForSequenceClassification.from_pretrained),
        ("ours", lambda _: AutoModel.from_pretrained(tmp_path, subfolder="ours")),
        ("bert", HarmonicForMaskedLM.from_base),
    ):
        path = re.escape(str(tmp_path / name / "model.safetensors"))
        with pytest.raises(ValueError, match=f"^{path}: expected whole weights, got a file that"):
            load(str(tmp_path / name))


def test_a_damaged_file_that_is_not_read_stops_nothing(bases, tmp_path):
    folder = shutil.copytree(bases / "bert", tmp_path / "bert")
    (folder / "consolidated.safetensors").write_text("version https://git-lfs.github.com/spec/v1")
    HarmonicForMaskedLM.from_base(str(folder))


def test_one_of_our_checkpoints_is_a_base_too(bases, tmp_path):
    first = HarmonicForMaskedLM.from_base(str(bases / "bert"), head={"name": "linear"}, tie=True)
    with torch.no_grad():
        first.dist_head.bias.normal_()
    first.save_pretrained(tmp_path)
    inputs = batch()
    same_head = HarmonicForMaskedLM.from_base(
        str(tmp_path), head={"name": "linear"}, init="base_head"
    )
    torch.testing.assert_close(same_head(**inputs).loss, first(**inputs).loss)
    new_head = HarmonicForMaskedLM.from_base(str(tmp_path))
    assert new_head.h_exp == -12.0
    with pytest.raises(
        ValueError, match=r"init base_head: expected base .* to have a head like .*'dist'"
    ):
        HarmonicForMaskedLM.from_base(str(tmp_path), init="base_head")
    with pytest.raises(
        ValueError, match=r"init: expected one of \['input_embeddings', 'output_emb"
    ):
        HarmonicForMaskedLM.from_base(str(tmp_path), init="zeros")
    with pytest.raises(
        ValueError, match=r"head: expected \{'name': \.\.\., fields\.\.\.\}, got 'dist'"
    ):
        HarmonicForMaskedLM.from_base(str(tmp_path), head="dist")
    with pytest.raises(
        ValueError, match=r"dtype: expected a dtype such as torch\.bfloat16, got 'float17'"
    ):
        HarmonicForMaskedLM.from_base(str(tmp_path), dtype="float17")


def test_neobert_gives_its_own_decoder_to_a_linear_head(bases):
    model = HarmonicForMaskedLM.from_base(
        str(bases / "neobert"), head={"name": "linear"}, init="base_head"
    )
    inputs = batch()
    inputs.pop("labels")
    expected = AutoModelForMaskedLM.from_pretrained(bases / "neobert")(**inputs).logits
    torch.testing.assert_close(model(**inputs).logits, expected, rtol=1e-5, atol=1e-5)


def test_a_tied_16_bit_model_is_loaded_in_16_bits_and_takes_new_embeddings(bases, tmp_path):
    model = HarmonicForMaskedLM.from_base(str(bases / "bert"), tie=True, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    again = HarmonicForMaskedLM.from_pretrained(tmp_path)
    assert again.dist_head.weight.dtype == torch.float32
    ids = torch.arange(5, 9).view(1, 4)
    assert torch.equal(again(ids).logits, model(ids).logits)
    model.set_input_embeddings(torch.nn.Embedding(V, SIZES["hidden_size"]))
    model.tie_weights()
    assert model.dist_head.weight is model.get_input_embeddings().weight
    assert model(ids).logits.isfinite().all()


def test_a_tied_table_is_as_exact_as_its_body(bases, tmp_path):
    model = HarmonicForMaskedLM.from_base(str(bases / "neobert"), tie=True, dtype=torch.float64)
    assert model.dist_head.weight.dtype == torch.float64
    model.save_pretrained(tmp_path)
    again = HarmonicForMaskedLM.from_pretrained(tmp_path)
    ids = torch.arange(5, 9).view(1, 4)
    assert torch.equal(again(ids).logits, model(ids).logits)


def test_a_model_that_is_not_ours_is_refused(bases):
    with pytest.raises(ValueError, match=r"got one of type 'bert'.*HarmonicForMaskedLM\.from_base"):
        HarmonicForMaskedLM.from_pretrained(bases / "bert")


@pytest.mark.parametrize("family", FAMILIES)
def test_frozen_blocks_hold_no_graph_and_no_dropout(bases, family):
    model = HarmonicForMaskedLM.from_base(str(bases / family))
    blocks = find_blocks(model.model.backbone)[1]
    model.model.requires_grad_(False)
    blocks[-1].requires_grad_(True)
    model.train()
    assert [block.training for block in blocks] == [False, False, True]
    assert not model.get_input_embeddings().training
    graphs = []
    for block in blocks:
        block.register_forward_hook(
            lambda _, args, output: graphs.append(
                (output[0] if isinstance(output, tuple) else output).requires_grad
            )
        )
    model(**batch()).loss.backward()
    assert graphs == [False, False, True]
    assert all(p.grad is None for block in blocks[:2] for p in block.parameters())
    assert all(p.grad is not None for p in blocks[2].parameters())


def test_blocks_above_trained_positions_hold_a_graph(bases):
    model = HarmonicForMaskedLM.from_base(str(bases / "bert"))
    model.model.requires_grad_(False)
    model.model.backbone.embeddings.position_embeddings.requires_grad_(True)
    model.train()
    assert all(block.training for block in find_blocks(model.model.backbone)[1])


@pytest.mark.parametrize("family", FAMILIES)
def test_checkpointing_recomputes_only_blocks_with_a_graph(bases, family):
    model = HarmonicForMaskedLM.from_base(str(bases / family))
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    blocks = find_blocks(model.model.backbone)[1]
    model.model.requires_grad_(False)
    blocks[1].requires_grad_(True)
    model.train()
    model(**batch()).loss.backward()
    expected = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    calls = [0, 0, 0]
    for index, block in enumerate(blocks):
        inner = next(iter(block.children()))

        def count(*_, index=index):
            calls[index] += 1

        inner.register_forward_pre_hook(count)
    model.gradient_checkpointing_enable()
    assert [block.gradient_checkpointing for block in blocks] == [False, True, True]
    model(**batch()).loss.backward()
    assert calls == [1, 2, 2]
    for name, gradient in expected.items():
        torch.testing.assert_close(dict(model.named_parameters())[name].grad, gradient)
    with pytest.raises(ValueError, match="use_reentrant: expected False, got True"):
        model.gradient_checkpointing_enable({"use_reentrant": True})
    with pytest.raises(ValueError, match="gradient checkpointing: expected only"):
        model.gradient_checkpointing_enable(offload=True)


def test_checkpointing_is_refused_by_the_name_of_a_backbone_without_any(tmp_path):
    save_encoder("albert", tmp_path, embedding_size=32)
    model = HarmonicForMaskedLM.from_base(str(tmp_path))
    with pytest.raises(ValueError, match=r"gradient checkpointing: expected .*, got a AlbertM"):
        model.gradient_checkpointing_enable()


@pytest.mark.parametrize("family", FAMILIES)
def test_dropout_is_replaced_everywhere(bases, family):
    model = HarmonicForMaskedLM.from_base(str(bases / family), dropout=0.0).train()
    inputs = batch()
    assert torch.equal(model(**inputs).loss, model(**inputs).loss)
    if family == "bert":
        model = HarmonicForMaskedLM.from_base(str(bases / family), dropout=0.3).train()
        assert not torch.equal(model(**inputs).loss, model(**inputs).loss)
    if family == "neobert":
        with pytest.raises(ValueError, match=r"model\.dropout: expected a model with dropout"):
            HarmonicForMaskedLM.from_base(str(bases / family), dropout=0.3)


def test_embeddings_narrower_than_the_hidden_states_are_refused(tmp_path):
    config = ElectraConfig(**{**SIZES, "embedding_size": 16})
    ElectraForMaskedLM(config).save_pretrained(tmp_path)
    message = r"expected input embeddings as wide as .*\(32\), got 16. It can only be a classifier"
    for init in ("input_embeddings", "output_embeddings"):
        with pytest.raises(ValueError, match=message):
            HarmonicForMaskedLM.from_base(str(tmp_path), init=init)
    HarmonicForSequenceClassification.from_base(str(tmp_path), labels=["a", "b"])


def test_positions_of_a_row():
    assert max_positions(RobertaConfig(max_position_embeddings=514, pad_token_id=1)) == 512
    assert max_positions(BertConfig(max_position_embeddings=512)) == 512
    assert max_positions(BloomConfig()) > 10**6
    assert HarmonicConfig(text_config=BertConfig()).max_position_embeddings == 512
    assert not hasattr(HarmonicConfig(text_config=T5Config()), "max_position_embeddings")


def test_the_fields_of_the_body_that_scripts_read_and_set(tmp_path):
    config = HarmonicConfig(text_config=GPT2Config(n_embd=24))
    assert (config.hidden_size, config.bos_token_id, config.pad_token_id) == (24, 50256, None)
    config.pad_token_id = config.eos_token_id
    config.save_pretrained(tmp_path)
    saved = HarmonicConfig.from_pretrained(tmp_path)
    assert saved.pad_token_id == saved.text_config.pad_token_id == 50256


def test_a_shift_moves_logits_and_no_probability(bases, tmp_path):
    """On the sphere, logits are above 0 within an angle of 60 degrees: 90 with the shift."""
    model = HarmonicForMaskedLM.from_base(str(bases / "bert"), head={"name": "dist", "h_exp": -4.0})
    model.save_pretrained(tmp_path)
    shifted = HarmonicForMaskedLM.from_pretrained(tmp_path, logit_shift=4 * math.log(2))
    inputs = batch()
    with torch.no_grad():
        before, after = model(**inputs), shifted(**inputs)
        states = model.model(inputs["input_ids"], inputs["attention_mask"]).last_hidden_state
    cosines = torch.cosine_similarity(states.unsqueeze(-2), model.dist_head.prototypes, dim=-1)
    clear = (cosines.abs() > 1e-3) & ((cosines - 0.5).abs() > 1e-3)
    assert torch.equal((before.logits > 0)[clear], (cosines > 0.5)[clear])
    assert torch.equal((after.logits > 0)[clear], (cosines > 0)[clear])
    assert (after.logits > 0).sum() > 2 * (before.logits > 0).sum()
    torch.testing.assert_close(after.logits.softmax(-1), before.logits.softmax(-1))
    torch.testing.assert_close(after.loss, before.loss, rtol=0, atol=0)
    shifted.save_pretrained(tmp_path)
    assert HarmonicForMaskedLM.from_pretrained(tmp_path).config.logit_shift == 4 * math.log(2)


@pytest.mark.parametrize("task", ["tokens", "number"])
def test_the_trainer_of_transformers_accumulates_evaluates_and_predicts(bases, tmp_path, task):
    """Without `label_names`: every parameter of `forward` named like labels is taken for one."""
    HarmonicForMaskedLM.from_base(str(bases / "bert")).save_pretrained(tmp_path / "published")
    inputs = {**batch(0), "labels": batch(0)["labels"] if task == "tokens" else torch.arange(3.0)}
    rows = [{key: value[index] for key, value in inputs.items()} for index in range(3)]
    model_class, fields = (
        (HarmonicForMaskedLM, {})
        if task == "tokens"
        else (HarmonicForSequenceClassification, {"num_labels": 1})
    )
    losses = []
    for size, steps in ((3, 1), (1, 3)):
        torch.manual_seed(0)
        args = TrainingArguments(
            output_dir=str(tmp_path),
            per_device_train_batch_size=size,
            gradient_accumulation_steps=steps,
            max_steps=2,
            learning_rate=1e-2,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        )
        model = model_class.from_pretrained(tmp_path / "published", **fields)
        for part in model.modules():
            if isinstance(part, torch.nn.Dropout):
                part.p = 0.0
        trainer = Trainer(
            model,
            args,
            train_dataset=rows,
            eval_dataset=rows,
            compute_metrics=lambda found: {"size": float(found.predictions.size)},
        )
        trainer.train()
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    found = trainer.evaluate()
    with torch.no_grad():
        expected = model.eval()(**inputs)
    # The mean over batches is that over texts alone.
    if task == "number":
        assert found["eval_loss"] == pytest.approx(expected.loss.item(), rel=1e-4)
    assert found["eval_loss"] > 0
    assert found["eval_size"] == expected.logits.numel()
    predicted = trainer.predict(rows)
    torch.testing.assert_close(torch.tensor(predicted.predictions), expected.logits)
    assert predicted.label_ids.tolist() == inputs["labels"].tolist()


def test_packed_rows_reach_the_model_through_a_plain_trainer(bases, tmp_path):
    model = HarmonicForMaskedLM.from_base(str(bases / "bert")).eval()
    ids = batch()["input_ids"][:1, :8]
    labels = torch.where(torch.arange(8) % 3 == 1, ids, -100)
    rows = {"input_ids": ids, "labels": labels, "position_ids": torch.arange(8)[None] % 4}
    arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
    data = Dataset.from_dict({key: value.tolist() for key, value in rows.items()})
    found = Trainer(model, arguments, eval_dataset=data).evaluate()["eval_loss"]
    with torch.no_grad():
        packed = model(**rows).loss.item()
        whole = model(**{**rows, "position_ids": None}).loss.item()
    assert found == pytest.approx(packed, rel=1e-5)
    assert abs(packed - whole) > 1e-3


def test_a_configuration_may_ask_for_all_hidden_states(bases, tmp_path):
    HarmonicForMaskedLM.from_base(str(bases / "bert")).save_pretrained(tmp_path)
    inputs = batch()
    for loader, kind in ((AutoModel, HarmonicModel), (AutoModelForMaskedLM, HarmonicForMaskedLM)):
        model = loader.from_pretrained(tmp_path, output_hidden_states=True)
        assert type(model) is kind
        assert len(model(inputs["input_ids"]).hidden_states) == 1 + SIZES["num_hidden_layers"]
        assert model(inputs["input_ids"], output_hidden_states=False).hidden_states is None


def test_a_backbone_that_transformers_lacks_is_named(bases, tmp_path):
    HarmonicForMaskedLM.from_base(str(bases / "bert")).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["text_config"]["model_type"] = "next_year"
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"has, got 'next_year'\. Update transformers"):
        HarmonicConfig.from_pretrained(tmp_path)
