"""Any decoder under any head: training, saving, generating with and without a cache."""

import json
import math
import re
from pathlib import Path

import pytest
import torch
import transformers
from packaging.version import Version
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    BloomConfig,
    BloomForCausalLM,
    DynamicCache,
    GenerationConfig,
    Trainer,
    TrainingArguments,
    pipeline,
)

from harmonic_sft.losses import ArcFaceLoss
from harmonic_sft.models import (
    HarmonicConfig,
    HarmonicForCausalLM,
    HarmonicForMaskedLM,
    build_head,
)
from harmonic_sft.models.backbones import CACHE
from harmonic_sft.models.bases import base_of, load_base
from tests.decoders import FAMILIES, D, V, save_decoder, save_tokenizer

ROWS = torch.randint(3, V, (2, 10), generator=torch.Generator().manual_seed(0))
PADDED = torch.ones_like(ROWS)
PADDED[0, :4] = 0  # on the left
LENGTH = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
CAUSAL = {"dropout": None, "is_causal": True}
HEADS = {
    "sphere": {"name": "dist", "h_exp": -6.0},
    "euclid": {"name": "dist", "unit_sphere": False},
    "cosine": {"name": "cosine"},
}
GENERATOR = """
import sys, torch
from transformers import AutoModelForCausalLM
for name in sys.argv[1:]:
    model = AutoModelForCausalLM.from_pretrained(name, trust_remote_code=True)
    expected = torch.load(f"{name}-tokens", weights_only=True)
    assert torch.equal(model.generate(**expected["options"]), expected["tokens"]), name
    assert model.generation_config.eos_token_id == 2, name
    assert "use_cache" not in vars(model.config), name
    assert model.generation_config.use_cache is not False, name
"""


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    folder = tmp_path_factory.mktemp("decoders")
    return {family: save_decoder(family, folder / family) for family in FAMILIES}


def make(bases, family="llama", **options):
    options.setdefault("head", HEADS["sphere"])
    return HarmonicForCausalLM.from_base(str(bases[family]), **options)


def train(model):
    """Train the last block and the head for three steps."""
    model.requires_grad_(False)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".1." in name or name.startswith("dist_head"))
    model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(3):
        loss = model(input_ids=ROWS, attention_mask=torch.ones_like(ROWS), labels=ROWS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        model.renormalize_prototypes_()
        losses.append(loss.item())
    model.eval()
    return losses


@pytest.mark.parametrize("family", FAMILIES)
def test_caches_and_left_padding_change_no_token(bases, family):
    model = make(bases, family)
    tokens = model.generate(ROWS, attention_mask=PADDED, **LENGTH)
    assert tokens.shape == (2, 18)
    uncached = model.generate(ROWS, attention_mask=PADDED, use_cache=False, **LENGTH)
    assert torch.equal(tokens, uncached)
    alone = model.generate(ROWS[:1, 4:], **LENGTH)
    assert torch.equal(tokens[0, 10:], alone[0, 6:])


@pytest.mark.parametrize("family", ["phi3", "llama"])
def test_caches_change_no_token_where_the_factors_of_long_rope_change(tmp_path, family):
    limit = ROWS.shape[1] + 6
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [4.0] * 4,
        "original_max_position_embeddings": limit,
    }
    own = {"rope_parameters": rope, "original_max_position_embeddings": limit}
    model = make({family: save_decoder(family, tmp_path, **own)}, family)
    options = {**LENGTH, "max_new_tokens": 24, "attention_mask": PADDED}
    embeddings = model.get_input_embeddings()(ROWS)
    for given in ({}, {"num_beams": 3}, {"inputs_embeds": embeddings}):
        tokens = model.generate(ROWS, **{**options, **given})
        assert torch.equal(tokens, model.generate(ROWS, use_cache=False, **{**options, **given}))


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3", "gemma2", "mistral"])
def test_three_steps_lower_the_loss_and_frozen_blocks_hold_no_graph(bases, family):
    model = make(bases, family)
    losses = train(model)
    assert losses[2] < losses[0]
    embeddings = model.get_input_embeddings().get_parameter("weight")
    assert not embeddings.requires_grad
    model.train()
    seen = []
    blocks = next(m for m in model.modules() if isinstance(m, torch.nn.ModuleList))
    hook = blocks[0].register_forward_hook(
        lambda _, __, output: seen.append(output[0] if isinstance(output, tuple) else output)
    )
    model(input_ids=ROWS, labels=ROWS)
    hook.remove()
    assert not seen[0].requires_grad


def test_published_models_need_no_package(bases, check_elsewhere, elsewhere):
    for family, head in (("llama", "sphere"), ("gpt2", "euclid"), ("gemma3_text", "cosine")):
        model = make(bases, family, head=HEADS[head])
        train(model)
        model.config.use_cache = False  # as a trainer does
        path = check_elsewhere.add(family, model, "AutoModelForCausalLM", input_ids=ROWS)
        options = {"input_ids": ROWS, "attention_mask": PADDED, **LENGTH}
        torch.save({"options": options, "tokens": model.generate(**options)}, f"{path}-tokens")
    check_elsewhere.run()
    elsewhere(GENERATOR, *check_elsewhere.paths)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["gemma", "gemma2", "gemma3_text"])
def test_a_tied_16_bit_gemma_scales_embeddings_as_transformers_does(bases, tmp_path, family, dtype):
    native = AutoModel.from_pretrained(bases[family], dtype=dtype).eval()
    expected = native(input_ids=ROWS).last_hidden_state
    loaded = make(bases, family, tie=True, dtype=dtype)
    wide = load_base(str(bases[family]), None, head_class=None, dtype=torch.float32, **CAUSAL)
    cast = base_of(wide.backbone, dtype=dtype, is_causal=True)
    for model in (loaded, HarmonicForCausalLM.on_base(cast, head=HEADS["sphere"], tie=True)):
        assert model.dist_head.weight.dtype == torch.float32
        assert torch.equal(model.model(input_ids=ROWS).last_hidden_state, expected)
        model.save_pretrained(tmp_path)
        again = HarmonicForCausalLM.from_pretrained(tmp_path)
        assert torch.equal(again(input_ids=ROWS).logits, model(input_ids=ROWS).logits)


@pytest.mark.slow  # ten seconds of threads that wait for one another
def test_continuous_batching_says_what_a_batch_says(bases):
    """Its pages go to attention under the name that transformers 5.24 gives a decoder's cache."""
    model = make(bases).eval()
    prompts = [ROWS[0, :4].tolist(), ROWS[1].tolist()]
    sizes = {"num_blocks": 16, "max_batch_tokens": 64, "eos_token_id": -1, "pad_token_id": 0}
    config = GenerationConfig(**LENGTH, **sizes)
    found = model.generate_batch(prompts, generation_config=config, progress_bar=False)
    for prompt, output in zip(prompts, found.values(), strict=True):
        alone = model.generate(torch.tensor([prompt]), **LENGTH)[0, len(prompt) :]
        assert output.generated_tokens == alone.tolist()


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3_text"])
def test_every_way_to_generate(bases, family):
    model = make(bases, family)
    greedy = model.generate(ROWS, **LENGTH)
    torch.manual_seed(0)
    sampled = model.generate(ROWS, **{**LENGTH, "do_sample": True, "top_k": 50})
    assert sampled.shape == greedy.shape
    assert not torch.equal(sampled, greedy)
    beams = model.generate(ROWS, num_beams=3, **LENGTH)
    assert beams.shape == greedy.shape
    # transformers' own Gemma 3 fails with 5.17, but not with 5.10 and 5.23.
    if family != "gemma3_text" or Version(transformers.__version__) >= Version("5.18"):
        helper = make(bases, family, head=HEADS["cosine"])
        assisted = model.generate(ROWS[:1], assistant_model=helper, **LENGTH)
        assert torch.equal(assisted, greedy[:1])
    if family == "llama":  # others do not stop at the number of layers in their configuration
        drafted = model.generate(ROWS[:1], assistant_early_exit=1, **LENGTH)
        assert torch.equal(drafted, greedy[:1])
    static = model.generate(ROWS, cache_implementation="static", **LENGTH)
    assert torch.equal(static, greedy)


@pytest.mark.skipif(
    "create_masks_for_generate" not in vars(BloomForCausalLM), reason="an older transformers"
)
def test_a_static_cache_has_the_masks_of_the_bases_own_class(tmp_path):
    """BLOOM makes its own of two axes."""
    config = BloomConfig(vocab_size=V, hidden_size=32, n_layer=2, n_head=4)
    BloomForCausalLM(config).save_pretrained(tmp_path)
    model = HarmonicForCausalLM.from_base(str(tmp_path))
    options = {**LENGTH, "attention_mask": PADDED}
    expected = model.generate(ROWS, use_cache=False, **options)
    assert torch.equal(model.generate(ROWS, cache_implementation="static", **options), expected)


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # of its own compiler
@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "cache"), [("eager", "static"), ("eager", None), ("inductor", "static")]
)
def test_generating_under_compile_changes_no_token(bases, backend, cache):
    model = make(bases)
    greedy = model.generate(ROWS, **LENGTH)
    torch._dynamo.reset()
    model.forward = torch.compile(model.forward, backend=backend)  # the latter wants a C++ compiler
    assert torch.equal(model.generate(ROWS, cache_implementation=cache, **LENGTH), greedy)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.slow
def test_a_compiled_loop_of_the_user_has_the_cache_that_it_asks_for(bases):
    model = make(bases).eval()
    torch._dynamo.reset()
    step = torch.compile(model, backend="eager")
    tokens, positions, past = ROWS, torch.arange(ROWS.shape[1])[None], None
    for _ in range(4):
        with torch.no_grad():
            outputs = step(tokens, position_ids=positions, past_key_values=past, use_cache=True)
        past, tokens = outputs.past_key_values, outputs.logits[:, -1:].argmax(-1)
        positions = positions[:, -1:] + 1
    options = {**LENGTH, "max_new_tokens": 4, "min_new_tokens": 4}
    assert torch.equal(tokens, model.generate(ROWS, **options)[:, -1:])


def test_the_pipeline_writes_text(bases, tmp_path):
    model = make(bases)
    model.save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    write = pipeline("text-generation", model=str(tmp_path))
    assert isinstance(write.model, HarmonicForCausalLM)
    text = write("w5 w6", **LENGTH)[0]["generated_text"]
    rows = AutoTokenizer.from_pretrained(tmp_path)("w5 w6", return_tensors="pt").input_ids
    expected = model.generate(rows, **LENGTH)[0]
    assert [f"w{index}" for index in text.replace("w", " ").split()] == [
        f"w{index}" for index in expected.tolist()
    ]


def test_the_loss_is_that_of_the_next_tokens(bases):
    model = make(bases)
    labels = ROWS.clone()
    labels[0, 5:] = -100
    with torch.no_grad():
        logits = model(input_ids=ROWS).logits.double()
        outputs = model(input_ids=ROWS, labels=labels)
    assert torch.equal(outputs.logits.double(), logits)
    assert model.train()(input_ids=ROWS, labels=labels).logits is None
    expected, count = 0.0, 0
    for row in range(2):
        for position in range(9):
            label = labels[row, position + 1].item()
            if label != -100:
                expected -= logits[row, position].log_softmax(-1)[label].item()
                count += 1
    assert count == 4 + 9
    assert outputs.loss.item() == pytest.approx(expected / count, rel=1e-5)
    shown = model(input_ids=ROWS, labels=labels, output_logits=True)
    assert shown.logits.shape == (2, 10, V)


def test_nobody_takes_the_head_for_a_linear_softmax(bases):
    model = make(bases)
    assert model.get_output_embeddings() is None
    assert "weight" in dict(model.dist_head.named_parameters())


def test_an_offloaded_head_gives_the_same_logits_and_no_loss(bases, tmp_path):
    model = make(bases)
    model.save_pretrained(tmp_path)
    places, files = {"model": "cpu", "dist_head": "disk"}, tmp_path / "offloaded"
    moved = HarmonicForCausalLM.from_pretrained(tmp_path, device_map=places, offload_folder=files)
    assert torch.equal(moved(ROWS).logits, model(ROWS).logits)
    with pytest.raises(NotImplementedError, match="meta tensor; no data"):
        moved(ROWS, labels=ROWS)


def test_labels_that_are_shifted_already_are_not_shifted_again(bases):
    model = make(bases)
    labels = ROWS.clone()
    labels[0, 5:] = -100
    shifted = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
    expected = model(input_ids=ROWS, labels=labels).loss
    outputs = model(input_ids=ROWS, shift_labels=shifted)
    torch.testing.assert_close(outputs.loss, expected)
    both = model(input_ids=ROWS, labels=labels, shift_labels=shifted, output_logits=False)
    torch.testing.assert_close(both.loss, expected)
    assert both.logits is None
    assert outputs.past_key_values is None


def test_logits_to_keep(bases):
    model = make(bases)
    with torch.no_grad():
        whole = model(input_ids=ROWS).logits
        last = model(input_ids=ROWS, logits_to_keep=2).logits
        some = model(input_ids=ROWS, logits_to_keep=torch.tensor([1, 4])).logits
    torch.testing.assert_close(last, whole[:, -2:])
    torch.testing.assert_close(some, whole[:, [1, 4]])


def test_the_cache_is_there_when_it_is_of_use(bases):
    model = make(bases)
    with torch.no_grad():
        assert isinstance(model(input_ids=ROWS).past_key_values, DynamicCache)
        assert model.model(input_ids=ROWS).past_key_values is None
        assert model(input_ids=ROWS, labels=ROWS).past_key_values is None
        assert model(input_ids=ROWS, use_cache=False).past_key_values is None
        assert model.train()(input_ids=ROWS).past_key_values is None


def test_prototypes_come_from_either_end(bases, tmp_path):
    native = AutoModelForCausalLM.from_pretrained(bases["mistral"])  # untied
    tables = {
        "input_embeddings": native.get_input_embeddings().weight,
        "output_embeddings": native.get_output_embeddings().weight,
    }
    for init, table in tables.items():
        model = make(bases, "mistral", init=init, head=HEADS["euclid"])
        assert torch.equal(model.dist_head.weight, table)
        model = make(bases, "mistral", init=init)
        expected = torch.nn.functional.normalize(table, dim=-1)
        torch.testing.assert_close(model.dist_head.prototypes, expected)
    model.save_pretrained(tmp_path)
    again = HarmonicForCausalLM.from_base(str(tmp_path), init="output_embeddings")
    torch.testing.assert_close(again.dist_head.prototypes, model.dist_head.prototypes)


def test_a_base_is_a_relative_path_and_a_dtype_a_name(bases, tmp_path, monkeypatch):
    monkeypatch.chdir(bases["llama"].parent)
    model = HarmonicForCausalLM.from_base(Path("llama"), dtype="bfloat16")
    assert (model.dtype, model.dist_head.weight.dtype) == (torch.bfloat16, torch.float32)
    model.save_pretrained(tmp_path)
    assert HarmonicForCausalLM.from_pretrained(tmp_path).config.base_model == "llama"


def test_a_new_head_keeps_the_settings_of_generation(bases, tmp_path):
    model = make(bases)
    model.generation_config.eos_token_id = [2, 7]
    model.save_pretrained(tmp_path)
    again = HarmonicForCausalLM.from_base(str(tmp_path), head=HEADS["cosine"])
    assert again.generation_config.eos_token_id == [2, 7]


def test_the_old_head_stays_with_base_head(bases):
    native = AutoModelForCausalLM.from_pretrained(bases["gemma2"]).eval()
    head = {"name": "linear", "bias": False, "softcap": 2.0}
    model = make(bases, "gemma2", head=head, init="base_head")
    with torch.no_grad():
        torch.testing.assert_close(model(input_ids=ROWS).logits, native(input_ids=ROWS).logits)
        loss = native(input_ids=ROWS, labels=ROWS).loss
        torch.testing.assert_close(model(input_ids=ROWS, labels=ROWS).loss, loss)
    with pytest.raises(ValueError, match=r"a head like .*False}, got .*'softcap': 2.0"):
        make(bases, "gemma2", head={"name": "linear", "bias": False}, init="base_head")
    with pytest.raises(ValueError, match=r"a head like .*True}, got .*'softcap': 2.0"):
        make(bases, "gemma2", head={"name": "linear"}, init="base_head")
    with pytest.raises(ValueError, match=r"expected base .* to have a head like .*'dist'"):
        make(bases, "gemma2", init="base_head")


@pytest.mark.parametrize("tie", [False, True])
def test_added_tokens_get_prototypes_like_the_others(bases, tmp_path, tie):
    head = {"name": "linear", "bias": True} if tie else HEADS["sphere"]
    model = make(bases, "llama", head=head, tie=tie)
    before = model.dist_head.prototypes.clone()
    model.resize_token_embeddings(V + 5)
    after = model.dist_head.prototypes
    assert after.shape == (V + 5, D)
    assert model.config.text_config.vocab_size == V + 5
    assert torch.equal(after[:V], before)
    if tie:
        assert model.dist_head.weight is model.get_input_embeddings().weight
        assert model.dist_head.bias.shape == (V + 5,)
    else:  # not all at the mean of the old ones
        assert (after[V:] @ after[V:].T).fill_diagonal_(0).abs().max() < 0.9
    with torch.no_grad():
        assert model(input_ids=ROWS).logits.shape[-1] == V + 5
    model.save_pretrained(tmp_path)
    again = HarmonicForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(again.dist_head.prototypes, model.dist_head.prototypes)
    model.resize_token_embeddings(V - 7)
    assert torch.equal(model.dist_head.prototypes, before[: V - 7]) or tie


def test_new_prototypes_have_the_dtype_of_the_old(bases):
    model = make(bases).double()
    model.resize_token_embeddings(V + 5)
    assert model.dist_head.weight.dtype == torch.float64


def test_many_new_prototypes_have_the_spread_of_the_old():
    torch.manual_seed(0)
    from harmonic_sft.models.heads import resized_head

    head = build_head({"name": "linear"}, hidden_size=3, vocab_size=400)
    with torch.no_grad():
        head.weight.copy_(torch.randn(400, 3) * torch.tensor([1.0, 2.0, 0.1]) + 5)
    new = resized_head(head, 20_400).weight[400:]
    torch.testing.assert_close(new.mean(0), head.weight.mean(0), atol=0.05, rtol=0)
    torch.testing.assert_close(new.T.cov(), head.weight.T.cov(), atol=0.1, rtol=0.05)


def test_label_smoothing_of_transformers_shifts_labels(bases, tmp_path):
    model = make(bases)
    args = TrainingArguments(tmp_path, label_smoothing_factor=0.1, use_cpu=True, report_to=[])
    found = Trainer(model, args).compute_loss(model, {"input_ids": ROWS, "labels": ROWS.clone()})
    scores = model(input_ids=ROWS).logits[:, :-1].log_softmax(-1)
    own = -scores.gather(-1, ROWS[:, 1:, None]).mean()
    torch.testing.assert_close(found, 0.9 * own - 0.1 * scores.mean())


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_the_head_that_peft_trains_is_the_one_that_counts(bases):
    model = make(bases, head=HEADS["cosine"])
    model.loss_fn = ArcFaceLoss().prepare(model.dist_head)
    lora = LoraConfig(target_modules=["q_proj"], modules_to_save=["dist_head"])
    wrapped = get_peft_model(model, lora)
    assert model.active_head is model.dist_head.modules_to_save["default"]
    wrapped(input_ids=ROWS, labels=ROWS).loss.backward()
    assert model.active_head.weight.grad.abs().sum() > 0
    with wrapped.disable_adapter():
        assert model.active_head is model.dist_head.original_module


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
@pytest.mark.filterwarnings("ignore:.*tie_word_embeddings:UserWarning")
@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}, "Linear"),
        ({"target_parameters": ["dist_head.weight"]}, "ParamWrapper"),
    ],
)
def test_what_peft_puts_in_place_of_a_head_is_refused(bases, options, found):
    model = make(bases, tie="modules_to_save" in options)
    wrapped = get_peft_model(model, LoraConfig(target_modules=["q_proj"], **options))
    for labels in (None, ROWS):
        with pytest.raises(ValueError, match=f"dist_head: expected a head, got PEFT's {found}"):
            wrapped(input_ids=ROWS, labels=labels)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_the_exponent_is_that_of_the_head_which_computes(bases):
    model = make(bases, head={**HEADS["sphere"], "learn_h_exp": True})
    model.dist_head.log_steepness.data.fill_(1.0)
    assert model.h_exp == pytest.approx(-math.e)
    wrapped = get_peft_model(
        model, LoraConfig(target_modules=["q_proj"], modules_to_save=["dist_head"])
    )
    before = wrapped(input_ids=ROWS).logits
    model.h_exp = -2 * math.e
    torch.testing.assert_close(wrapped(input_ids=ROWS).logits, 2 * before)


def test_a_saved_model_is_not_loaded_as_one_of_the_other_direction(bases, tmp_path):
    make(bases).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="is_causal: expected False for a HarmonicForMaskedLM"):
        HarmonicForMaskedLM.from_pretrained(tmp_path)
    for decoder, got in ((tmp_path, "['HarmonicForCausalLM']"), (bases["llama"], "a decoder")):
        with pytest.raises(ValueError, match=re.escape(f"expected an encoder, got {got}")):
            HarmonicForMaskedLM.from_base(str(decoder))
    config = HarmonicConfig.from_pretrained(tmp_path)
    assert config.is_causal
    config.is_causal = False
    with pytest.raises(ValueError, match="is_causal: expected True for a HarmonicForCausalLM"):
        HarmonicForCausalLM(config)


@pytest.mark.parametrize("name", ["past_key_values", "cache"])  # before transformers 5.24, since
def test_a_cache_is_taken_under_both_of_its_names(bases, name):
    model = make(bases)
    with torch.no_grad():
        whole = model(input_ids=ROWS).logits
        cache = model(input_ids=ROWS[:, :3])[CACHE]
        last = model(input_ids=ROWS[:, 3:], use_cache=True, **{name: cache})
    assert last[CACHE].get_seq_length() == ROWS.shape[1]
    torch.testing.assert_close(last.logits, whole[:, 3:])


def test_the_cache_can_be_turned_off_while_loading(bases, tmp_path):
    make(bases).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, use_cache=False)
    assert model(ROWS).past_key_values is None
    assert model(ROWS, use_cache=True).past_key_values is not None
    model.save_pretrained(tmp_path)
    assert AutoModelForCausalLM.from_pretrained(tmp_path)(ROWS).past_key_values is not None


@pytest.mark.parametrize("init", ["output_embeddings", "base_head"])
def test_a_tied_head_is_not_said_to_start_from_another(bases, init):
    head = {"name": "linear"} if init == "base_head" else HEADS["sphere"]
    with pytest.raises(ValueError, match=f"expected input_embeddings for a tied head, got {init}"):
        make(bases, "llama", head=head, init=init, tie=True)


def test_an_adapter_on_the_form_head_is_loaded_again(bases, tmp_path, monkeypatch):
    """PEFT's files stand in a folder of their own and name the repository below."""
    monkeypatch.setattr("transformers.integrations.peft.check_peft_version", lambda **_: None)
    make(bases).save_pretrained(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    model.add_adapter(LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    model.save_pretrained(tmp_path / "adapter")
    whole = model(ROWS).logits
    state = {**model.state_dict()}
    plain = {k.replace(".base_layer", ""): v for k, v in state.items() if "lora_" not in k}
    module = "harmonic_sft.models.modeling_backbone.complete_state_dict"
    monkeypatch.setattr(module, lambda *_: plain)
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps({**config, "partial": True}))
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "adapter")
    torch.testing.assert_close(again(ROWS).logits, whole)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_an_adapter_holds_the_embeddings_of_a_resized_vocabulary(bases, tmp_path):
    make(bases).save_pretrained(tmp_path / "model")

    def resized(seed):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
        model.resize_token_embeddings(V + 2, mean_resizing=False)
        return model

    options = {"target_modules": ["q_proj"], "modules_to_save": ["dist_head"]}
    model = get_peft_model(resized(0), LoraConfig(r=2, **options)).eval()
    with pytest.warns(UserWarning, match="`save_embedding_layers` to `True`"):
        model.save_pretrained(tmp_path / "adapter")
    again = PeftModel.from_pretrained(resized(1), tmp_path / "adapter").eval()
    new = torch.tensor([[5, V, V + 1, 6]])
    torch.testing.assert_close(again(new).logits, model(new).logits)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_a_vocabulary_is_resized_under_peft_too(bases):
    plain = make(bases)
    plain.resize_token_embeddings(V + 2)
    options = {"target_modules": ["q_proj"], "modules_to_save": ["dist_head"]}
    wrapped = get_peft_model(make(bases), LoraConfig(r=2, **options))
    wrapped.resize_token_embeddings(V + 2)
    assert torch.equal(wrapped(ROWS).logits, plain(ROWS).logits)
    assert wrapped.active_head.weight.requires_grad
    with wrapped.disable_adapter():
        assert torch.equal(wrapped(ROWS).logits, plain(ROWS).logits)


def test_new_prototypes_of_a_mixture_have_slices_of_norm_1(bases):
    """The head inside it would bring whole rows to norm 1."""
    model = make(bases, head={"name": "multi_head", "inner": {"name": "cosine"}})
    model.resize_token_embeddings(V + 2)
    torch.testing.assert_close(model.dist_head.weight, model.dist_head.prototypes)


def test_a_configuration_says_and_takes_the_sizes_of_its_body(bases, tmp_path):
    """PEFT loads the configuration of any base by this class, to compare vocabularies."""
    config = make(bases).config
    config.vocab_size = V + 4
    assert config.text_config.vocab_size == V + 4
    bare = HarmonicConfig.from_pretrained(bases["llama"])
    assert (bare.vocab_size, bare.max_position_embeddings) == (V, 64)


def test_a_cache_of_tuples_is_not_ignored(bases):
    keys = torch.zeros(2, 2, 3, 8)
    with pytest.raises(AttributeError):
        make(bases)(ROWS, past_key_values=((keys, keys),) * 2)


@pytest.mark.parametrize("family", ["gemma2", "llama"])
def test_the_configuration_says_which_attention_the_body_has(family, tmp_path):
    base = save_decoder(family, tmp_path / "base")
    expected = AutoModelForCausalLM.from_pretrained(base).config._attn_implementation
    model = HarmonicForCausalLM.from_base(str(base))
    model.save_pretrained(tmp_path / "saved")
    for one in (model, HarmonicForCausalLM.from_pretrained(tmp_path / "saved")):
        used = one.config._attn_implementation
        assert used == one.model.backbone.config._attn_implementation == expected
    # As TRL loads a reference model.
    HarmonicForCausalLM.from_pretrained(tmp_path / "saved", attn_implementation=used)
