"""Features with a known answer, and an encoder that does not see its batches."""

import numpy as np
import pytest
import torch
from transformers import AutoModel

from harmonic_sft.eval.features import (
    encode,
    encode_layers,
    few_shots,
    out_of_scope,
    probe,
    repetition,
    typos,
    wrong_labels,
)
from harmonic_sft.eval.word_similarity import similarity
from harmonic_sft.models import HarmonicForMaskedLM


def clusters(num_classes=4, seed=0):
    generator = np.random.default_rng(seed)
    centers = np.eye(num_classes, 16)
    labels = np.repeat([f"class {index}" for index in range(num_classes)], 30)
    noise = 0.1 * generator.normal(size=(len(labels), 16))
    return np.repeat(centers, 30, axis=0) + noise, labels.tolist()


def test_features_do_not_depend_on_batches_and_order(tiny_base, tokenizer):
    model = HarmonicForMaskedLM.from_base(str(tiny_base))
    texts = ["aa ab", "ba", "aa ab ac ad ba bb bc", "ca cb cc", ""]
    whole = encode(model.model, tokenizer, texts)
    one = encode(model.model, tokenizer, texts[::-1], batch_size=1)[::-1]
    np.testing.assert_allclose(whole, one, atol=1e-6)
    tokenizer.padding_side = "left"  # in vain, since it would move positions
    np.testing.assert_allclose(encode(model.model, tokenizer, texts), whole, atol=1e-6)
    with torch.no_grad():
        batch = tokenizer(texts[2], return_tensors="pt")
        states = model.model(batch["input_ids"]).last_hidden_state[0]
    np.testing.assert_allclose(whole[2], states.mean(0), atol=1e-6)
    with pytest.raises(ValueError, match="texts: expected at least one, got none"):
        encode(model.model, tokenizer, [])


def test_texts_are_cut_to_the_positions_of_the_body(tiny_base, tokenizer):
    body = AutoModel.from_pretrained(tiny_base)
    cut, whole = (encode(body, tokenizer, ["aa " * count]) for count in (200, 62))
    np.testing.assert_allclose(cut, whole, atol=1e-6)


def test_hidden_layers_are_those_of_the_body(tiny_base, tokenizer):
    body = AutoModel.from_pretrained(tiny_base)
    texts = ["aa ab ac", "ba", "ca cb"]
    found = encode_layers(body, tokenizer, texts, batch_size=2)
    last = body.config.num_hidden_layers
    assert [name for name, _ in found] == [f"layer {n} of {last}" for n in range(last + 1)]
    with torch.no_grad():
        output = body(**tokenizer(texts[0], return_tensors="pt"), output_hidden_states=True)
    for (_, vectors), states in zip(found, output.hidden_states, strict=True):
        np.testing.assert_allclose(vectors[0], states[0].mean(0), atol=1e-6)
    np.testing.assert_allclose(found[-1][1], encode(body, tokenizer, texts), atol=1e-6)


def test_classes_that_lie_apart_are_found_by_every_probe():
    train, test = clusters(), clusters(seed=1)
    rotated = np.roll(test[0], 1, axis=1)  # what lies at one center now lies at the next
    found = probe(train, [test[0], rotated], test[1])
    assert set(found) == {"logistic", "mlp", "knn", "class_means"}
    for plain, wrong in found.values():
        assert plain > 0.98
        assert wrong < 0.2


def test_labels_that_nothing_can_be_learned_of_are_refused():
    features, labels = clusters()
    with pytest.raises(ValueError, match=r"contains only one class: .*'class 0'"):
        probe((features[:5], labels[:5]), [features[:5]], labels[:5])
    lost = ["class 0" if label == "class 3" else label for label in labels]
    found = probe((features, lost), [features], labels)
    assert 0.7 < found["knn"][0] < 0.8  # of four classes one is gone


def test_texts_of_unknown_classes_lie_further_away():
    features, labels = clusters(num_classes=6)
    is_known = np.array(labels) < "class 4"
    train = features[is_known], [label for label in labels if label < "class 4"]
    inside = clusters(num_classes=6, seed=1)[0][is_known]
    found = out_of_scope(train, inside, features[~is_known])
    assert min(found[name] for name in ("class_mean_cosine", "nearest", "mahalanobis")) > 0.99
    assert min(found["max_probability"], found["energy"]) > 0.95
    same = out_of_scope(train, inside, inside[::-1])
    assert all(value == pytest.approx(0.5, abs=1e-6) for value in same.values())


def test_float32_states_with_a_large_common_mean_are_told_apart_as_exactly():
    """As layers have them whose cosines are all 0.9999999."""
    features, labels = clusters(num_classes=6)
    features = (1 + 1e-4 * features).astype(np.float32)
    is_known = np.array(labels) < "class 4"
    known = [label for label in labels if label < "class 4"]
    found, exact = (
        out_of_scope((same[is_known], known), same[is_known], same[~is_known])
        for same in (features, features.astype(np.float64))
    )
    ratings, wide = range(len(features) - 1), features.astype(np.float64)
    same = similarity(wide[:-1], wide[1:], ratings)
    assert similarity(features[:-1], features[1:], ratings) == same
    for name in ("class_mean_cosine", "nearest"):
        assert found[name] == exact[name]


def test_few_examples_and_wrong_labels_are_as_many_as_asked_for():
    labels = ["a"] * 30 + ["b"] * 3 + ["c"] * 67
    places = few_shots(labels, 5)
    assert [labels[place] for place in places] == ["a"] * 5 + ["b"] * 3 + ["c"] * 5
    noisy = wrong_labels(labels, 0.3)
    assert sum(a != b for a, b in zip(labels, noisy, strict=True)) == 30
    assert set(noisy) == set(labels)
    assert wrong_labels(labels, 0.0) == labels


def test_typos_swap_letters_inside_words():
    (text,) = typos(["some words with letters of a long text " * 20])
    original = ("some words with letters of a long text " * 20).split(" ")
    changed = [(a, b) for a, b in zip(original, text.split(" "), strict=True) if a != b]
    assert 4 < len(changed) < 20
    assert all(sorted(a) == sorted(b) and a[0] == b[0] and a[-1] == b[-1] for a, b in changed)


def test_repetition_is_counted():
    loop = torch.tensor([[1, 2] * 8])
    found = repetition(loop)
    assert found["distinct_1"] == 2 / 16
    assert found["distinct_2"] == 2 / 15
    assert found["repeated_4"] == pytest.approx(11 / 13)
    fresh = repetition(torch.arange(32).reshape(2, 16))
    assert fresh == {"distinct_1": 1, "distinct_2": 1, "repeated_4": 0}
