"""Parallelograms by the paper's two components, against loops and scikit-learn's PCA."""

import numpy as np
import pytest
import torch
from sklearn.decomposition import PCA

from experiments.harmonic_loss import gpt, words
from experiments.stacked import principal_components
from harmonic_sft.eval.geometry import parallelograms


def table_and_pairs(noise):
    """Return 60 random rows where row i + 20 is row i plus one offset and noise, for i < 20."""
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(60, 6, generator=generator)
    table[20:40] = table[:20] + 2 * table[59] + noise * table[40:]
    return table, [(number, number + 20) for number in range(20)]


def test_scores_are_those_of_loops_over_quadruples(monkeypatch):
    monkeypatch.setattr(words, "NUM_QUADRUPLES", 40)
    table, pairs = table_and_pairs(noise=0.5)
    _, (places,) = principal_components(table.unsqueeze(0))
    scores, shuffled = words.two_component_scores(places, pairs)
    plane = PCA(2).fit_transform(table.double().numpy())
    scale = (plane**2).sum(1).mean()
    generator = torch.Generator().manual_seed(0)
    first = torch.randint(20, (40,), generator=generator).tolist()
    step = torch.randint(1, 20, (40,), generator=generator).tolist()
    orders = [torch.randperm(20, generator=generator).tolist() for _ in range(words.NUM_ORDERS)]
    for number, (one, more) in enumerate(zip(first, step, strict=True)):
        (a, b), (c, d) = pairs[one], pairs[(one + more) % 20]
        expected = ((plane[b] - plane[a] - plane[d] + plane[c]) ** 2).sum() / scale
        assert float(scores[number]) == pytest.approx(expected)
        order = orders[number % words.NUM_ORDERS]
        b, d = pairs[order[one]][1], pairs[order[(one + more) % 20]][1]
        expected = ((plane[b] - plane[a] - plane[d] + plane[c]) ** 2).sum() / scale
        assert float(shuffled[number]) == pytest.approx(expected)


def test_one_offset_is_perfect_and_its_shuffled_control_is_not():
    table, pairs = table_and_pairs(noise=0.0)
    found = words.measure(table, {"antonym": pairs})["antonym"]
    assert found["two_components"] == pytest.approx(0, abs=1e-9)
    assert found["full"] == pytest.approx(0, abs=1e-6)
    assert found["ratio"] < 1e-9
    assert found["two_components_shuffled"] > 0.1
    assert found["full_shuffled"] > 0.1
    table, pairs = table_and_pairs(noise=1.0)
    noisy = words.measure(table, {"synonym": pairs[:4], "antonym": pairs})["antonym"]
    assert noisy["ratio"] == noisy["two_components"] / noisy["two_components_shuffled"] > 0.05
    assert noisy["full_ratio"] == noisy["full"] / noisy["full_shuffled"]
    middle = noisy["quantiles"][words.NUM_QUANTILES // 2]
    assert middle == pytest.approx(noisy["two_components"], abs=1e-3)
    assert noisy["quantiles"] == sorted(noisy["quantiles"])


def test_pairs_are_single_tokens_of_two_different_words(language_data, small_language):
    tokenizer = gpt.read_corpus(language_data / "text").tokenizer
    one, two = (tokenizer.encode(f" {word}").ids for word in ("bar", "baren"))
    assert (len(one), len(two)) == (1, 1)
    items = [("bar", "baren"), ("bar", "baren"), ("bar", "bar"), ("bar", "unheardof")]
    items = [{"input": first, "output": second} for first, second in items]
    assert words.read_pairs(items, tokenizer) == [(one[0], two[0])]


def test_layers_are_those_of_words_read_alone(small_language):
    body, _ = gpt.build("linear", 0)
    pairs = [(number, number + 9) for number in range(8)]
    found = words.measure_layers(body, pairs)
    assert len(found) == 3  # the embeddings and two blocks
    states = [body(torch.tensor([[word]])).last_hidden_state[0, 0].detach() for word in range(17)]
    expected = parallelograms(torch.stack(states), pairs)
    np.testing.assert_allclose(found[-1], list(expected.values()), rtol=1e-4)
