import pytest

from harmonic_sft.models import HEADS
from harmonic_sft.training import load_run_config

DEMO = "configs/demo.yaml"


@pytest.mark.parametrize("name", HEADS)
def test_every_head_is_a_section_with_its_own_defaults(name):
    if name == "dist":
        overrides = []
    else:
        overrides = [f"head={{name: {name}}}", "h_exp=null", "loss={name: cross_entropy}"]
    run = load_run_config(DEMO, overrides)
    assert run.head.name == run.head_settings()["name"] == name
    assert run.head.init == "input_embeddings"
    assert not run.head.tie


def test_the_exponent_goes_to_the_dist_head_wherever_it_stands():
    inner = "{name: multi_head, num_heads: 2, inner: {name: dist, eps: 1e-4}}"
    run = load_run_config(DEMO, [f"head={{name: rotation, inner: {inner}}}", "h_exp.start=-9"])
    settings = run.head_settings()
    assert settings["inner"]["inner"] == {"name": "dist", "eps": 1e-4, "h_exp": -9.0}


def test_a_learned_exponent_reaches_the_head():
    run = load_run_config(DEMO, ["h_exp={start: -9, end: -9, schedule: learned}"])
    assert run.head_settings()["learn_h_exp"]
    assert run.learns_h_exp


@pytest.mark.parametrize(
    ("head", "message"),
    [
        ("{name: dits}", r"head\.name: expected one of .*, got 'dits'. Did you mean 'dist'"),
        ("{name: dist, epss: 1}", r"head\.epss: expected .* Did you mean 'eps'"),
        ("{name: dist, h_exp: -3}", r"head\.h_exp: expected one of the known keys"),
        ("{name: dist, eps: -1}", r"eps: expected a number above 0, got -1"),
        ("{name: rotation, inner: {name: dits}}", r"head\.inner\.name: expected one of"),
        ("{name: rotation, inner: {name: dist, h_exp: -3}}", r"head\.inner\.h_exp: expected"),
        ("{name: rotation, inner: {name: dist, init: x}}", r"head\.inner\.init: expected"),
        (
            "{name: rotation, inner: {name: multi_head, inner: {name: dist, eps: a}}}",
            r"head\.inner\.inner\.eps: expected a number, got 'a'",
        ),
    ],
)
def test_unknown_names_and_fields_are_refused_at_any_depth(head, message):
    with pytest.raises(ValueError, match=message):
        load_run_config(DEMO, [f"head={head}"])


def test_words_for_booleans_become_booleans_inside_too():
    run = load_run_config(DEMO, ["head={name: rotation, inner: {name: dist, unit_sphere: 'no'}}"])
    assert run.head_settings()["inner"]["unit_sphere"] is False


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["h_exp=null"], "h_exp: expected start and end for a dist head"),
        (
            ["head={name: cosine}", "loss={name: cross_entropy}"],
            "h_exp: expected nothing for a cos",
        ),
        (["head={name: cosine}", "h_exp=null"], "loss.name: expected 'cross_entropy' for a cosine"),
        (["loss={name: arcface}"], "loss arcface: expected a cosine head, got dist"),
        (["h_exp={start: -9, end: -4, schedule: learned}"], "end: expected the start"),
    ],
)
def test_head_exponent_and_loss_must_fit(overrides, message):
    with pytest.raises(ValueError, match=message):
        load_run_config(DEMO, overrides)
