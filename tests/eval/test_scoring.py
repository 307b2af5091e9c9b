"""Metrics against one token at a time."""

import math
import tracemalloc
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torchmetrics.functional.classification import multiclass_calibration_error

from harmonic_sft.eval import documents_of, score, summarize, unigram_loss
from harmonic_sft.eval.calibration import LOG_SCALES
from harmonic_sft.models import CosineHead, DistLayer, LinearHead

B, T, D, V = 4, 6, 16, 30
TABLE = torch.randn(V, D, generator=torch.Generator().manual_seed(1))


def model_of(head):
    """What `score` needs of a model."""
    return SimpleNamespace(dist_head=head, class_embeddings=lambda: TABLE)


def calibration_error(probs, labels):
    return float(multiclass_calibration_error(probs, labels, V, n_bins=15, norm="l1"))


def batch():
    torch.manual_seed(0)
    labels = torch.randint(V, (B, T))
    labels[torch.rand(B, T) < 0.5] = -100
    labels[2] = -100  # a row with nothing to predict
    return torch.randn(B, T, D), labels


def metrics_of(head, states, labels):
    scores = score(model_of(head), [(states, labels)])
    return summarize(scores, head, np.arange(len(labels)))


def test_a_head_that_gives_all_classes_one_logit_is_never_right():
    states, labels = batch()
    labels[0, 0] = 0  # the class that `max` takes of equal ones
    head = LinearHead(D, V)
    torch.nn.init.zeros_(head.weight)
    metrics = metrics_of(head, states, labels)
    assert (metrics["accuracy"], metrics["top_5_accuracy"]) == (0, 0)
    assert metrics["loss"] == pytest.approx(math.log(V))
    found = score(model_of(head), [(states, labels)])
    assert (found.predicted != found.labels).all()
    pairs = [TABLE[torch.as_tensor(one)] for one in (found.predicted, found.labels)]
    np.testing.assert_allclose(found.cosines, F.cosine_similarity(*pairs), atol=1e-6)


def test_normalizers_of_steep_logits_equal_float64():
    states, labels = batch()
    head = LinearHead(D, V)
    found = score(model_of(head), [(400 * states, labels)]).normalizers
    logits = head(400 * states)[labels != -100].detach().double()
    below = logits - logits.amax(-1, keepdim=True)
    assert below.min() < -200  # far below what float32 can hold the exponential of
    exact = [(below * scale).logsumexp(-1) for scale in np.exp(LOG_SCALES)]
    np.testing.assert_allclose(found, torch.stack(exact, -1), atol=2e-6)


def test_scores_and_their_losses_take_few_bytes_a_token():
    """A million tokens took 0.97 GB with their metrics."""
    states, labels = batch()
    head = DistLayer(D, V)
    found = score(model_of(head), [(states, labels)] * 1000)
    count = len(found.labels)
    assert sum(column.nbytes for column in found[:-1]) <= 200 * count
    tracemalloc.start()
    losses, _ = found.at(1.0)
    assert tracemalloc.get_traced_memory()[1] < 100 * count
    tracemalloc.stop()
    exact = found.normalizers.astype(np.float64)[:, np.abs(LOG_SCALES).argmin()] - found.margins
    np.testing.assert_allclose(losses, exact, atol=1e-9)


def test_logits_of_a_few_tokens_at_a_time_give_the_same_scores(monkeypatch):
    """Those of all tokens of a batch are 4 GiB for 8 rows of 1,024 and 128,256 classes."""
    states, labels = batch()
    head, seen = DistLayer(D, V), []
    whole = score(model_of(head), [(states, labels)])
    head.register_forward_hook(lambda _, __, logits: seen.append(logits.shape))
    monkeypatch.setattr("harmonic_sft.ops.dense_chunks.CPU_BYTES", 3 * 4 * V)
    found = score(model_of(head), [(states, labels)])
    assert set(seen) == {(3, V), (len(found.labels) % 3 or 3, V)}
    for one, other in zip(found[:-1], whole[:-1], strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6, rtol=1e-6)  # products of other sizes


@pytest.mark.parametrize("head_class", [DistLayer, LinearHead])
def test_metrics_equal_a_loop_over_tokens(head_class):
    states, labels = batch()
    head = head_class(D, V)
    metrics = metrics_of(head, states, labels)
    losses, hits, top, cosines, probs, briers = [], [], [], [], [], []
    for b in range(B):
        for t in range(T):
            if labels[b, t] != -100:
                logits = head(states[b, t][None]).detach().double()
                losses.append(F.cross_entropy(logits, labels[b, t][None]).item())
                predicted, label = int(logits.argmax()), int(labels[b, t])
                hits.append(predicted == label)
                top.append(label in logits[0].topk(5).indices)
                probs.append(logits.softmax(-1)[0])
                briers.append(float((probs[-1] - F.one_hot(labels[b, t], V)).square().sum()))
                if predicted != label:
                    one, other = TABLE[predicted].double(), TABLE[label].double()
                    cosines.append(float(one @ other / one.norm() / other.norm()))
    assert metrics["tokens"] == len(losses)
    assert metrics["loss"] == pytest.approx(np.mean(losses), rel=1e-5)
    assert metrics["accuracy"] == pytest.approx(np.mean(hits))
    assert metrics["top_5_accuracy"] == pytest.approx(np.mean(top))
    assert metrics["brier"] == pytest.approx(np.mean(briers), rel=1e-5)
    assert metrics["error_cosine"] == pytest.approx(np.mean(cosines), rel=1e-5, abs=1e-6)
    ece = calibration_error(torch.stack(probs), labels[labels != -100])
    assert metrics["ece"] == pytest.approx(ece, rel=1e-5)


def test_a_half_is_scored_at_the_exponent_of_the_other():
    """By heads that really have that exponent."""
    torch.manual_seed(0)
    head = DistLayer(D, V, h_exp=-12.0)
    labels = torch.randint(V, (40, 3))
    states = head.weight.detach()[labels] + 0.4 * torch.randn(40, 3, D)
    metrics = metrics_of(head, states, labels)

    def loss_at(h_exp, rows):
        other = DistLayer(D, V, h_exp=h_exp)
        other.load_state_dict(head.state_dict())
        return other.nll(states[rows].flatten(0, 1), labels[rows].flatten()).mean().item()

    halves = slice(0, None, 2), slice(1, None, 2)
    tried = np.linspace(-14, -2, 241)
    best = [tried[np.argmin([loss_at(h, half) for h in tried])] for half in halves]
    expected = np.mean([loss_at(best[1], halves[0]), loss_at(best[0], halves[1])])
    assert abs(best[0] - best[1]) > 0.1  # else the test shows nothing
    assert metrics["post_hoc_loss"] == pytest.approx(expected, abs=1e-4)
    whole = tried[np.argmin([loss_at(h, slice(None)) for h in tried])]
    assert metrics["post_hoc_h_exp"] == pytest.approx(whole, abs=0.06)
    assert metrics["h_exp"] == -12.0


def test_texts_that_alternate_between_two_classes_are_not_halved_by_class():
    torch.manual_seed(0)
    head = LinearHead(D, 2)
    with torch.no_grad():
        head.bias.copy_(torch.tensor([1.0, -1.0]))  # so that each class asks for another factor
    labels = torch.arange(400).remainder(2)[:, None]  # [400, 1]
    states = 3 * head.weight.detach()[labels] + torch.randn(400, 1, D)
    order = torch.randperm(400)
    alternating, shuffled = (
        metrics_of(head, rows, classes)["post_hoc_loss"]
        for rows, classes in ((states, labels), (states[order], labels[order]))
    )
    assert alternating == pytest.approx(shuffled, abs=0.01)


def test_the_best_exponent_of_long_hidden_states_is_found():
    torch.manual_seed(0)
    head = DistLayer(D, V, h_exp=-48.0, unit_sphere=False)
    labels = torch.randint(V, (B, T))
    noise = 0.6 * torch.randn(B, T, D)
    states = 40 * F.normalize(F.normalize(head.weight.detach(), dim=-1)[labels] + noise, dim=-1)
    assert -48 * 16 < metrics_of(head, states, labels)["post_hoc_h_exp"] < -64


def test_without_errors_there_is_no_error_cosine():
    head = DistLayer(D, V)
    labels = torch.arange(6).view(3, 2)
    metrics = metrics_of(head, head.weight.detach()[labels], labels)
    assert metrics["accuracy"] == 1
    assert "error_cosine" not in metrics


def test_a_linear_head_gets_the_same_freedom():
    states, labels = batch()
    metrics = metrics_of(LinearHead(D, V), states, labels)
    assert metrics["post_hoc_loss"] < metrics["loss"]
    assert metrics["post_hoc_inverse_temperature"] < 0.2  # of a random head
    assert "h_exp" not in metrics


@pytest.mark.parametrize("head_class", [DistLayer, CosineHead])
def test_batches_do_not_change_the_numbers(head_class):
    states, labels = batch()  # which seeds the head too
    head = head_class(D, V)
    expected = score(model_of(head), [(states, labels)])
    cut = score(model_of(head), [(states[i : i + 1, :6], labels[i : i + 1, :6]) for i in range(B)])
    for column, other in zip(cut, expected, strict=True):
        np.testing.assert_allclose(column, other, rtol=1e-5, atol=1e-6)
    assert cut.num_rows == B
    assert documents_of([0] * B, B).tolist() == [0, 1, 2, 3]


def test_nothing_to_evaluate_is_an_error():
    head = LinearHead(D, V)
    states, labels = batch()
    with pytest.raises(ValueError, match="evaluation: expected labelled tokens, got none"):
        metrics_of(head, states, torch.full_like(labels, -100))
    assert score(model_of(head), []) is None


def test_a_damaged_checkpoint_is_an_error():
    head = LinearHead(D, V)
    states, labels = batch()
    states[0] = torch.nan
    count, total = int((labels[0] != -100).sum()), int((labels != -100).sum())
    message = f"expected finite logits, got others for {count} of {total} tokens. The weights"
    with pytest.raises(ValueError, match=message):
        metrics_of(head, states, labels)


def test_unigram_loss_is_the_smoothed_frequency():
    counts = np.array([3, 0, 5])
    labels = np.array([0, 1, 2, 2])
    expected = -np.mean([math.log(4 / 11), math.log(1 / 11), *[math.log(6 / 11)] * 2])
    assert unigram_loss(labels, counts) == pytest.approx(expected)
