"""The tasks are what their names say; one split leaks and the other does not."""

from itertools import permutations

import pytest
import torch

from experiments.harmonic_loss.data import TASKS, draw_examples, share_seen
from experiments.stacked import seeded_generators

SIZES = {  # distinct examples, inputs, tokens
    "in_context": (7225, 3, 25),
    "modular_addition": (961, 2, 31),
    "equivalence": (1600, 2, 42),
    "genealogy": (373, 2, 130),
    "permutation": (576, 2, 24),
}
LEAKS = {  # the reference's share of test examples seen in training, 80 % of 1,000 draws
    "in_context": 0.105,
    "modular_addition": 0.565,
    "equivalence": 0.394,
    "genealogy": 0.883,
    "permutation": 0.0,
}


@pytest.mark.parametrize("name", TASKS)
def test_examples_are_distinct_and_complete(name):
    task = TASKS[name]()
    num_examples, num_inputs, vocab_size = SIZES[name]
    assert task.inputs.shape == (num_examples, num_inputs)
    assert len(torch.unique(task.inputs, dim=0)) == num_examples
    assert task.vocab_size == vocab_size
    assert max(task.inputs.max(), task.labels.max()) < vocab_size


def test_lattice_points_close_a_parallelogram():
    task = TASKS["in_context"]()
    a, b, c = task.inputs.T
    for part in (lambda token: token // 5, lambda token: token % 5):
        assert torch.equal(part(a) + part(task.labels), part(b) + part(c))


def test_equivalence_is_true_for_a_fifth_of_the_pairs():
    task = TASKS["equivalence"]()
    x, y = task.inputs.T
    assert torch.equal(task.labels == 40, x % 5 == y % 5)
    assert (task.labels == 40).sum() == 320
    assert set(task.labels.tolist()) == {40, 41}
    assert task.tokens == range(40)


@pytest.mark.parametrize(
    ("example", "label"),
    [((6, 127), 3), ((6, 128), 1), ((6, 129), 7), ((7, 129), 6), ((126, 129), 127), ((2, 127), 1)],
)
def test_relatives_are_those_of_a_binary_tree(example, label):
    task = TASKS["genealogy"]()
    found = (task.inputs == torch.tensor(example)).all(-1)
    assert task.labels[found].tolist() == [label]
    assert task.tokens == range(1, 127)


def test_permutations_compose():
    task, group = TASKS["permutation"](), list(permutations(range(4)))
    for (x, y), label in zip(task.inputs.tolist(), task.labels.tolist(), strict=True):
        assert group[label] == tuple(group[x][group[y][place]] for place in range(4))


@pytest.mark.parametrize("name", TASKS)
def test_the_released_split_leaks_as_much_as_chance_says(name):
    examples = draw_examples(TASKS[name](), "released", 0.8, seeded_generators(range(10)))
    shares = share_seen(examples)
    assert sum(shares) / 10 == pytest.approx(LEAKS[name], abs=0.03)


@pytest.mark.parametrize("name", TASKS)
def test_the_clean_split_has_no_example_twice(name):
    task = TASKS[name]()
    examples = draw_examples(task, "clean", 0.8, seeded_generators([0, 1]))
    size = min(1000, SIZES[name][0])
    assert examples.labels.shape == (2, size)
    assert examples.num_training == int(0.8 * size)
    assert share_seen(examples) == [0.0, 0.0]
    for inputs, labels in zip(examples.inputs, examples.labels, strict=True):
        assert len(torch.unique(inputs, dim=0)) == size
        known = dict(zip(map(tuple, task.inputs.tolist()), task.labels.tolist(), strict=True))
        assert [known[tuple(one)] for one in inputs.tolist()] == labels.tolist()
    assert not torch.equal(examples.inputs[0], examples.inputs[1])
