"""One YAML: what is read, what is refused, and with which words."""

import re
from pathlib import Path

import pytest
from transformers import TrainingArguments

from harmonic_sft import HEADS
from harmonic_sft.config import parse, read_yaml
from harmonic_sft.training.run_config import (
    HExpConfig,
    RunConfig,
    ScheduleConfig,
    load_run_config,
)

CONFIGS = Path(__file__).parents[2] / "configs"
DEMO = CONFIGS / "demo.yaml"


def test_neobert_is_the_recipe():
    run = load_run_config(CONFIGS / "neobert.yaml")
    assert run.model.base == "chandar-lab/NeoBERT"
    assert run.model.revision == "5424c8efeea6491b151d62dee55a752165407430"
    assert (run.model.dtype, run.model.unfreeze.last_blocks) == ("bfloat16", 1)
    assert (run.h_exp.start, run.h_exp.end) == (-12.0, -4.0)
    args = run.training_arguments()
    assert (args.learning_rate, args.adam_beta1, args.adam_beta2) == (2e-4, 0.95, 0.95)
    assert (args.per_device_train_batch_size, args.gradient_accumulation_steps) == (2, 16)
    assert run.schedule.warmup_ratio == 0.1
    assert run.data.context_length == 4096
    assert run.oom_fallback


def test_the_demo_is_that_recipe_on_a_small_base():
    plan, demo = load_run_config(CONFIGS / "neobert.yaml"), load_run_config(DEMO)
    for section in ("head", "h_exp", "loss", "schedule"):
        assert getattr(demo, section) == getattr(plan, section)
    assert demo.data.mask == plan.data.mask
    for key in ("learning_rate", "adam_beta1", "adam_beta2", "weight_decay", "max_grad_norm"):
        assert demo.training[key] == plan.training[key]


def test_another_head_brings_its_loss_and_exponent(tmp_path):
    linear = load_run_config(DEMO, head="linear")
    assert (linear.head.name, linear.h_exp, linear.loss.name) == ("linear", None, "cross_entropy")
    held = load_run_config(CONFIGS / "demo_constant.yaml", ["head.eps=1e-5"], head="dist")
    assert (held.head.model_extra["eps"], held.h_exp.end, held.loss.name) == (1e-5, -12, "harmonic")
    assert load_run_config(DEMO, head="cosine").head_settings()["name"] == "cosine"
    behind = load_run_config(CONFIGS / "modernbert.yaml", head="cosine")
    assert behind.head_settings()["name"] == "transform"
    assert behind.head_settings()["inner"]["name"] == "cosine"
    with pytest.raises(ValueError, match=r"head.name: expected one of \['linear', .* got 'dits'"):
        load_run_config(DEMO, head="dits")
    (tmp_path / "run.yaml").write_text("model: bert-base-uncased\n")
    with pytest.raises(ValueError, match="model: expected a mapping, got 'bert-base-uncased'"):
        load_run_config(tmp_path / "run.yaml", head="dist")


def test_lora_alone_trains_beside_the_head():
    text = {**read_yaml(DEMO), "training": {"output_dir": "runs/x"}}
    del text["model"]["unfreeze"]
    for peft in ({"r": 4}, {}):  # the latter has all defaults
        assert parse(RunConfig, {**text, "peft": peft}).model.unfreeze.last_blocks == 0
    assert parse(RunConfig, text).model.unfreeze.last_blocks == 1
    assert (
        load_run_config(DEMO, ["peft={r: 4}"]).model.unfreeze.last_blocks == 1
    )  # as the file says


def test_the_comparison_runs_differ_in_one_thing():
    """Also in what they hold out, which their base held out too."""
    demo, constant, linear, base = (
        load_run_config(CONFIGS / f"{name}.yaml")
        for name in ("demo", "demo_constant", "demo_linear", "demo_base")
    )
    assert base.data == demo.data
    assert (base.data.eval.documents, base.data.eval.seed) == (32, 42)
    for other, sections in ((constant, {"h_exp"}), (linear, {"head", "h_exp", "loss"})):
        fields = RunConfig.__dataclass_fields__
        different = {name for name in fields if getattr(other, name) != getattr(demo, name)}
        assert different == sections | {"training"}
        assert {**other.training, "output_dir": ""} == {**demo.training, "output_dir": ""}
    assert constant.h_exp.start == constant.h_exp.end == -12.0


def test_overrides_are_typed(make_yaml):
    run = load_run_config(
        make_yaml(),
        [
            "training.learning_rate=1e-4",
            "training.eval_strategy=no",
            "data.sources.0.column=body",
            "head={name: dist, unit_sphere: no}",
        ],
    )
    assert run.training["learning_rate"] == 1e-4
    assert run.training["eval_strategy"] == "no"
    assert run.data.sources[0].column == "body"
    assert run.head_settings()["unit_sphere"] is False


def test_the_p_that_older_runs_wrote_for_every_dist_head_is_read():
    assert load_run_config(DEMO, ["head.p=1.0"]) == load_run_config(DEMO)


@pytest.mark.parametrize("name", HEADS)
def test_every_head_is_a_section_with_its_own_defaults(name):
    others = [] if name == "dist" else ["h_exp=null", "loss={name: cross_entropy}"]
    run = load_run_config(DEMO, [f"head={{name: {name}}}", *others])
    assert run.head.name == run.head_settings()["name"] == name
    assert run.head.init == "input_embeddings"
    assert not run.head.tie


def test_the_exponent_goes_to_the_dist_head_wherever_it_stands():
    inner = "{name: multi_head, num_heads: 2, inner: {name: dist, eps: 1e-4, unit_sphere: 'no'}}"
    run = load_run_config(DEMO, [f"head={{name: rotation, inner: {inner}}}", "h_exp.start=-9"])
    dist = {"name": "dist", "eps": 1e-4, "unit_sphere": False, "h_exp": -9.0}
    assert run.head_settings()["inner"]["inner"] == dist


def test_a_learned_exponent_ends_where_it_starts_and_reaches_the_head():
    with pytest.raises(ValueError, match="h_exp: expected a number below 0 or a mapping, got 'l"):
        load_run_config(DEMO, ["h_exp=learned"])
    run = load_run_config(DEMO, ["h_exp={start: -9, schedule: learned}"])
    assert run.h_exp == HExpConfig(start=-9, end=-9, schedule="learned")
    assert run.head_settings()["learn_h_exp"]
    assert run.learns_h_exp


CLASSES = ["model={base: bert, task: sequence_classification}", "data.label_column=label"]
TIED = "head.tie: expected false, got true. A tied head trains the token embeddings: it needs"
REFUSED = [
    (
        ["modle.base=x"],
        "^modle: expected one of the known keys, .* Did you mean 'model'",
    ),
    (["max_steps=5"], r"^max_steps: .* Did you mean 'training\.max_steps'\?"),
    (["training.h_exp=-3"], r"training\.h_exp: .* Did you mean 'h_exp' at the top level\?"),
    (["data.sources=[]"], r"data.sources: expected at least 1 item, got \[\]"),
    (["training.output_dir="], "training.output_dir: expected a folder, got nothing"),
    (["training.ignore_data_skip=true"], "ignore_data_skip: .* resumed run would read other rows"),
    (["training.dataloader_persistent_workers=true"], "persistent_workers: .* dropout would not"),
    (
        ["training.lr=5"],
        r"^training\.lr: .* known keys, got 'lr'\. Did you mean 'learning_rate'\?$",
    ),
    (["training.batch_size=5"], "Did you mean 'per_device_train_batch_size'"),
    (["training.foo=5"], r"^training\.foo: expected one of the known keys, got 'foo'$"),
    (["training.max_stepz=5"], r"training.max_stepz: .*got 'max_stepz'. Did you mean 'max_steps'"),
    # The exponent.
    (["h_exp=null"], "h_exp: expected start and end for a dist head, got nothing"),
    (["h_exp=2.0"], "h_exp: expected a number below 0, got 2.0"),
    (["h_exp.start=-.inf"], "h_exp.start: expected a finite number"),
    (["h_exp={start: -8}"], "h_exp.end: expected .* Write end: -8.0 to hold the exponent, or end:"),
    (["h_exp={start: -8, end: -0.012}"], "h_exp.end: expected -0.0158 or less, got -0.012, at"),
    (["h_exp=-1e-9"], "h_exp.start: expected -0.0158 or less, got -1e-09, at which all classes"),
    (["h_exp.schedule=learned"], "h_exp.end: expected the start, -12.0, for a learned exponent"),
    (
        ["head={name: multi_head, inner: {name: dist}}", "loss=harmonic", "h_exp.calibrate=true"],
        "h_exp.calibrate: expected false for head multi_head",
    ),
    # The head.
    (["head.unit_spere=true"], r"head\.unit_spere: expected .* Did you mean 'unit_sphere'"),
    (["head.h_exp=-3"], r"head\.h_exp: .* known keys.* Did you mean 'h_exp' at the top level\?"),
    (["head.epsilon=1"], r"head\.epsilon: expected one of .* Did you mean 'eps'\?"),
    (["head.p=2.0"], r"p: expected"),
    (["head.eps=-1"], r"eps: expected a number above 0, got -1"),
    (["head={name: rotation, inner: {name: dits}}"], r"head\.inner\.name: expected one of"),
    (["head={name: rotation, inner: {name: [dist]}}"], r"head\.inner\.name: expected one of"),
    (["head={name: rotation, inner: {name: dist, h_exp: 1}}"], r"head\.inner\.h_exp: expected"),
    (
        ["head={name: rotation, inner: {name: multi_head, inner: {name: dist, eps: a}}}"],
        r"head\.inner\.inner\.eps: expected a number, got 'a'",
    ),
    (
        ["head={name: linear}"],
        "h_exp: expected nothing for a linear head, got -12 to -4. .* by h_exp=null",
    ),
    (["head={name: cosine}", "h_exp=null"], "loss harmonic: expected a dist head, got cosine"),
    (["loss={name: arcface}"], "loss arcface: expected a cosine head, got dist"),
    (["head.tie=true", "model.dtype=bfloat16"], TIED),
    (["head.tie=true"], TIED),
    (
        [
            "head.tie=true",
            "model={base: bert, task: sequence_classification, unfreeze: {patterns: ['*']}}",
            "data.label_column=label",
        ],
        TIED,
    ),
    (
        ["head.tie=true", "head.init=output_embeddings", "model.unfreeze={patterns: ['*']}"],
        TIED,
    ),
    (["head.init=random"], r"head.init: expected one of \['input_embeddings'.* for masked_lm, got"),
    (["model.task=causal_lm", "data.mask.probability=0.3"], "data.mask: expected nothing for cau"),
    # Classes.
    ([*CLASSES, "head.init=input_embeddings"], r"head.init: expected one of \['class_means', 'ra"),
    (CLASSES[:1], "data.label_column: expected a column for classification"),
    ([*CLASSES, "data.packing=true"], "data.packing: expected the default for classification"),
    (["model={base: bert, task: token_classification, pooling: cls}"], "pooling: expected nothing"),
    (CLASSES[1:], "data.label_column: expected nothing for masked_lm"),
    # Parts that train, and how fast.
    (["model.unfreeze.dtype=bfloat16"], "unfreeze.dtype: expected 'float32' on a float32 body"),
    (["model.unfreeze={}"], "last_blocks: expected this or patterns, got neither"),
    (["model.unfreeze.patterns=[x]"], "last_blocks: expected this or patterns, got both"),
    (["model.from_scratch=true"], r'model.unfreeze: expected \{patterns: \["\*"\]\} with from_scr'),
    (["schedule.warmup_ratio=0.9"], "warmup_ratio: expected at most 1 together with decay_ratio"),
    (["hub.push=true"], "hub.repo_id: expected owner/name with push: true, got nothing"),
    (["hub={push: true, repo_id: me/my model}"], "owner/name with push: true, got 'me/my model'"),
    (
        ["hub={push: true, repo_id: mine}"],
        "hub.repo_id: expected owner/name with push: true, got 'm",
    ),
    (["hub.every_save=true"], "hub.every_save: expected push: true beside it, got false"),
    (
        ["hub={push: true, repo_id: me/model, every_save: true}", "save=trainable"],
        "hub.every_save: expected false with save: trainable, got true",
    ),
    # LoRA.
    (["peft.r=0"], "peft.r: expected a number of at least 1, got 0"),
    (["peft.target_modules=[]"], "peft.target_modules: expected at least one, got none"),
    (["peft.layers_to_transform=[]"], "peft.layers_to_transform: expected at least one, got none"),
    (
        ["head.tie=true", "model.unfreeze={patterns: ['*']}", "peft.r=4"],
        TIED,
    ),
    # The loss.
    (["loss.epsilon=0.1"], r"loss.epsilon: expected one of the known keys, got 'epsilon'"),
    (["loss={name: knn_label_smothing}"], r"loss.name: .* Did you mean 'knn_label_smoothing'\?"),
    (["loss={name: distill}"], r"loss.name: expected another one for masked_lm"),
    (
        ["loss={name: sum, terms: [{loss: {name: harmonic}}, {loss: {name: cosface}}]}"],
        "loss cosface: expected a cosine head, got dist",
    ),
    (
        ["head={name: multi_head}", "h_exp=null", "loss={name: info_nce}"],
        "loss info_nce: expected a head of dot products",
    ),
    # transformers' arguments.
    (["training.fp16=true"], "training.fp16: expected nothing, got True; use model.dtype"),
    (["training.bf16=true"], "training.bf16: expected nothing, got True; use model.dtype"),
    (["data.context_length=0"], "data.context_length: expected"),
    (
        ["model.dtype=bfloat16", 'model.unfreeze={patterns: ["*"]}'],
        "model.dtype: expected that of unfreeze.dtype, 'float32', where everything trains",
    ),
    (["training.resume_from_checkpoint=true"], "expected nothing, got True; use resume: true"),
    (["training.lr_scheduler_type=linear"], "schedule: expected nothing beside training.lr_sch"),
    (["training.push_to_hub=true"], "write hub: {push: true, repo_id: owner/name}"),
    (["training.deepspeed=ds.json"], "got 'ds.json'; it keeps weights .* lose norm 1; use DDP"),
    (["training.fsdp=full_shard"], "training.fsdp: expected nothing, .* not supported yet"),
    (["training.save_only_model=true"], "such a checkpoint cannot be resumed"),
    (
        ["training.remove_unused_columns=true"],
        "columns: expected False, got True; your data_collator",
    ),
    pytest.param(
        ["training.dataloader_in_order=false"],
        "dataloader_in_order: expected True, got False; the order of rows would depend on",
        marks=pytest.mark.skipif(
            not hasattr(TrainingArguments, "dataloader_in_order"), reason="an older transformers"
        ),
    ),
    (["data.sources.0.streaming=true", "training.max_steps=-1"], "expected a number above 0 for a"),
    (
        ["training.load_best_model_at_end=true", "training.eval_strategy=steps"],
        "metric_for_best_model: expected 'post_hoc_loss' while h_exp is annealed, got the raw loss",
    ),
    (["training.save_strategy=best", "training.eval_strategy=steps"], "while h_exp is annealed"),
    (["training.metric_for_best_model=f1"], "metric_for_best_model: expected one of .* got 'f1'"),
    (["training.gradient_accumulation_steps=0"], "accumulation_steps: expected a number above 0"),
    (["training.eval_accumulation_steps=0"], "eval_accumulation_steps: expected a number above 0"),
    (["early_stopping_patience=0"], "early_stopping_patience: expected a number of at least 1"),
    (["training.learning_rate=.nan"], "training.learning_rate: expected a number above 0, got nan"),
    (["training.max_grad_norm=.inf"], "expected 0 or more, got inf; 0 is no clipping"),
    (["training.adam_beta1=1"], "training.adam_beta1: expected 0 or more and below 1, got 1"),
    (["training.weight_decay=-0.1"], "training.weight_decay: expected 0 or more, got -0.1"),
    (["training.eval_delay=.nan"], "training.eval_delay: expected a finite number, got nan"),
    (["training.hub_private_repo=true"], r"hub_private_repo: .* write hub: \{private: true\}"),
    (["training.hub_revision=dev"], r"hub_revision: .* write hub: \{revision: a branch\}"),
    (["training.lr_scheduler_type=liner"], r"lr_scheduler_type: .* Did you mean 'linear'\?"),
    (
        ["schedule=null", "training.lr_scheduler_kwargs={num_cycles: 3}"],
        r"lr_scheduler_kwargs: expected the options of warmup_stable_decay.* 'num_decay_steps'",
    ),
    (
        ["schedule=null", "training.lr_scheduler_type=cosine_with_min_lr"],
        r"lr_scheduler_kwargs: expected the options of cosine_with_min_lr.* min_lr_rate should",
    ),
    ([f"data.eval.seed={10**30}"], "data.eval.seed: expected a number below 9223372036854775808"),
    (["training.seed=-1"], "training.seed: expected 0 to 4294967295, got -1"),
    (["training.max_steps=0"], "training.max_steps: expected a number above 0, or -1"),
    (
        ['training.optim_args="betas=(0.1,0.2)"'],
        r"training.optim_args: expected NAME=VALUE.*'betas=\(0.1,0.2\)'. The betas have keys",
    ),
    (
        ["training.optim_args=amsgrad=True"],
        r"training.optim_args: expected nothing with adamw_torch, of which .* got 'amsgrad=True'",
    ),
    (["training.max_grad_norm=-1"], "training.max_grad_norm: expected 0 or more, got -1"),
    *(
        (
            [
                "model={base: x, dtype: bfloat16, unfreeze: {last_blocks: 1, dtype: bfloat16}}",
                f"training.optim={optim}",
            ],
            f"training.optim: expected adamw_torch for bfloat16 weights, got '{optim}'",
        )
        for optim in ("adafactor", "adamw_torch_8bit")  # the latter has states of 8 bits
    ),
]


@pytest.mark.parametrize(("overrides", "message"), REFUSED, ids=lambda value: str(value)[:40])
def test_bad_settings_are_refused_before_anything_is_loaded(make_yaml, overrides, message):
    with pytest.raises(ValueError, match=message):
        load_run_config(make_yaml(), overrides)


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        # Names of other trainers.
        ("num_epochs", "training.num_train_epochs"),
        ("training.bs", "per_device_train_batch_size"),
        ("max_seq_length", "data.context_length"),
        ("model_name_or_path", "model.base"),
        ("torch_dtype", "model.dtype"),
        ("data.dataset", "sources"),
        ("data.text_column", "data.sources.column"),
        ("gradient_clipping", "training.max_grad_norm"),
        ("peft.lora_r", "r"),
        ("head.type", "head.name"),
        ("hub.model_id", "repo_id"),
        ("training.patience", "early_stopping_patience' at the top level"),
        ("model.lora", "peft' at the top level"),
        # Nothing is like them.
        ("data.shuffle", None),
        ("device", None),
        ("training.device", None),
        ("training.gpus", None),
        ("hub.token", None),
        ("val_size", None),
        ("deepspeed", None),
        ("mask_ratio", None),
        ("peft.bias", None),
    ],
)
def test_a_key_of_other_trainers_gets_its_name_here_or_none(make_yaml, key, nearest):
    peft = ["peft={}"] if key.startswith("peft") else []
    with pytest.raises(ValueError, match=f"^{key}: expected one of the known keys") as error:
        load_run_config(make_yaml(), [*peft, f"{key}=1"])
    hint = re.search(r"Did you mean '(.*?)'?\?$", str(error.value))
    assert (hint and hint[1]) == nearest


def test_a_head_and_a_loss_may_be_a_name(make_yaml):
    words = ["head=cosine", "h_exp=null", "loss=cross_entropy"]
    run = load_run_config(make_yaml(), words)
    named = ["head={name: cosine}", "h_exp=null", "loss={name: cross_entropy}"]
    assert run == load_run_config(make_yaml(), named)
    for word, key in (("head=cosin", "head.name"), ("loss=arcfac", "loss")):
        message = rf"^{key}: expected one of .*got '{word[5:]}'\. Did you mean '{word[5:]}.'\?"
        with pytest.raises(ValueError, match=message):
            load_run_config(make_yaml(), [word])


def test_sections_of_ours_are_checked_before_those_of_transformers(make_yaml):
    with pytest.raises(ValueError, match="expected") as error:
        load_run_config(make_yaml(), ["training.max_stepz=5", "hub.formm=full", "head.epss=1"])
    places = {line.split(":")[0] for line in str(error.value).splitlines()}
    assert places == {"head.epss", "hub.formm"}


def test_an_error_does_not_repeat_a_token(make_yaml):
    with pytest.raises(ValueError, match=r"hub_token.* a token in a file leaks") as caught:
        load_run_config(make_yaml(), ["training.hub_token=hf_secret"])
    assert "hf_secret" not in str(caught.value)


def test_a_raw_loss_chooses_the_best_where_nothing_is_annealed(make_yaml):
    best = ["training.load_best_model_at_end=true", "training.eval_strategy=steps"]
    load_run_config(make_yaml(), ["h_exp=-12.0", *best])


def test_python_and_yaml_give_the_same_run(make_yaml):
    path = make_yaml()
    run = load_run_config(path)
    assert RunConfig(**read_yaml(path)) == run
    assert RunConfig(**{name: getattr(run, name) for name in vars(run)}) == run  # of sections
    assert run.seed == 42


@pytest.mark.parametrize("share", [1.0, 0.6, 0.0])
def test_phases_are_whole_steps_that_fill_the_run(share):
    """Also where both ratios add up to 1 and both would round up."""
    for twentieths in range(21):
        warmup, decay = share * twentieths / 20, share * (1 - twentieths / 20)
        schedule = ScheduleConfig(warmup_ratio=warmup, decay_ratio=decay)
        for total in (*range(1, 200), 10_000):
            warming, decaying = schedule.phase_steps(total)
            assert min(warming, decaying, total - warming - decaying) >= 0
            assert abs(warming - warmup * total) <= 1
            assert abs(decaying - decay * total) <= 1
            assert total == 1 or (warming > 0) == (warmup > 0)
            assert (decaying > 0) == (decay > 0)


def test_a_warmup_that_leaves_less_than_the_decay_wins():
    assert ScheduleConfig(decay_ratio=0.2).phase_steps(10, warmup_steps=9) == (9, 1)
