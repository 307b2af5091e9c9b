"""Two processes that share the vocabulary give what one gives."""

import multiprocessing
import shutil
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from harmonic_sft.ops import (
    LossOptions,
    distance_cross_entropy_with_metrics,
    fused,
    linear_cross_entropy_with_metrics,
)

KINDS = ["euclidean", "sphere", "linear"]
OPTIONS = [
    *("plain", "recompute", "soft target", "label_smoothing", "z_loss", "class_bias"),
    *("learned class_bias", "learned h_exp", "token_weights", "shifted", "all"),
    *(("native plain", "native all") if shutil.which("cc") or shutil.which("gcc") else ()),
]
SLICES = [slice(0, 700), slice(700, 1513)]
NUM_CLASSES, NUM_TOKENS, HIDDEN_SIZE = 1513, 21, 12
CASES = [
    (kind, option)
    for kind in KINDS
    for option in OPTIONS
    if kind != "linear" or option not in ("shifted", "learned h_exp")
]
TOLERANCE = 1e-6  # relative to the value, and to the largest of its tensor


def make_settings(kind, option, generator):
    """Options without bias and group, the bias `[V]` or None, and the exponent."""
    settings, bias, h_exp = {"gemm": "mm"}, None, -3.5
    if option.startswith("native"):
        settings["gemm"], option = option.split()
    if option == "recompute":
        settings["gradients"] = "recompute"
    if option in ("soft target", "all"):
        settings["target_weights"] = torch.rand(NUM_TOKENS, 3, generator=generator)
    if option in ("label_smoothing", "all"):
        settings["label_smoothing"] = 0.1
    if option in ("z_loss", "all"):
        settings["z_loss"] = 0.01
    if option in ("token_weights", "all"):
        settings["token_weights"] = torch.rand(NUM_TOKENS, generator=generator)
    if option.endswith("class_bias") or option == "all":
        bias = torch.randn(NUM_CLASSES, generator=generator)
    if option in ("learned h_exp", "all") and kind != "linear":
        h_exp = torch.tensor(-3.5, requires_grad=True)
    return settings, bias, h_exp


def run(kind, option, part=None, group=None):
    """Loss, metrics and gradients of the whole vocabulary, or of a part of it in a group."""
    generator = torch.Generator().manual_seed(len(option))
    part = slice(0, NUM_CLASSES) if part is None else part
    prototypes = torch.randn(NUM_CLASSES, HIDDEN_SIZE, generator=generator)
    if option == "shifted":  # measured about the mean over both ranks
        prototypes += 5 * torch.randn(HIDDEN_SIZE, generator=generator)
    labels = torch.randint(NUM_CLASSES, (NUM_TOKENS,), generator=generator)
    hidden_states = torch.randn(NUM_TOKENS, HIDDEN_SIZE, generator=generator)
    hidden_states += prototypes[labels]
    hidden_states[0] = prototypes[3] + 0.01 * hidden_states[0]  # near a wrong one on either rank
    hidden_states[1] = prototypes[900] + 0.01 * hidden_states[1]
    if kind == "linear":
        hidden_states /= 8  # float32 rounds logits of 30 by 1e-6
    settings, bias, h_exp = make_settings(kind, option, generator)
    if "target_weights" in settings:
        other = torch.randint(700, (NUM_TOKENS,), generator=generator)
        labels = torch.stack([labels, other, other + 800], 1)
        labels[2:5, 1] = labels[2:5, 2]  # repeated
        labels[4:7, 0] = -1  # padded
    leaves = {
        "hidden_states": hidden_states.requires_grad_(),
        "prototypes": prototypes[part].clone().requires_grad_(),
    }
    if bias is not None:
        bias = bias[part].clone().requires_grad_(option != "class_bias")
    if bias is not None and bias.requires_grad:
        leaves["class_bias"] = bias
    if isinstance(h_exp, torch.Tensor):
        leaves["h_exp"] = h_exp
    options = LossOptions(class_bias=bias, group=group, **settings)
    tensors = (leaves["hidden_states"], leaves["prototypes"], labels)
    distance = {"h_exp": h_exp, "unit_sphere": kind == "sphere"} if kind != "linear" else {}
    shared = {**distance, "options": options, "impl": "chunked"}
    with_metrics = (
        distance_cross_entropy_with_metrics if distance else linear_cross_entropy_with_metrics
    )
    loss, metrics = with_metrics(*tensors, **shared)
    found = {"loss": loss.detach(), **metrics._asdict()}
    for reduction, upstream in (("sum", 1.0), ("weighted", torch.linspace(-1, 2, NUM_TOKENS))):
        gradients = torch.autograd.grad(
            (loss * upstream).sum(), list(leaves.values()), retain_graph=True
        )
        found |= {f"{reduction} {name}": g for name, g in zip(leaves, gradients, strict=True)}
    return found


def work(rank, store, folder):
    torch.set_num_threads(1)
    fused.STORED_ROWS = fused.TILE_ROWS = 8  # three chunks
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    group = dist.new_group([0, 1])
    found = {case: run(*case, SLICES[rank], group) for case in CASES}
    torch.save(found, f"{folder}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What each rank found in all cases, by case."""
    folder = tmp_path_factory.mktemp("ranks")
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=work, args=(rank, folder / "store", folder)) for rank in range(2)
    ]
    for process in processes:
        process.start()
    try:
        for process in processes:
            process.join(120)
        assert [process.exitcode for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
            process.join()
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize(("kind", "option"), CASES)
def test_two_ranks_equal_one(kind, option, ranks):
    expected = run(kind, option)
    for rank, part in enumerate(SLICES):
        found = ranks[rank][kind, option]
        assert found.keys() == expected.keys()
        for name, actual in found.items():
            wanted = expected[name]
            split = "prototypes" in name or "class_bias" in name
            if name == "predictions":
                assert torch.equal(actual, wanted)
                continue
            difference = (actual - (wanted[part] if split else wanted)).abs()
            # Each about its own center, the distances round differently.
            tolerance = 10 * TOLERANCE if option == "shifted" else TOLERANCE
            limit = tolerance * (wanted.abs().max() + (wanted[part] if split else wanted).abs())
            assert (difference <= limit).all(), (name, (difference / limit).max())


@pytest.mark.parametrize("kind", KINDS)
def test_both_ranks_agree_to_the_last_bit(kind, ranks):
    left, right = (found[kind, "all"] for found in ranks)
    for name in left:
        if "prototypes" not in name and "class_bias" not in name:
            assert torch.equal(left[name], right[name]), name


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_ranks_with_slices_of_any_size_make_the_same_chunks(device):
    """Each chunk ends in an exchange between the ranks, and one of them would wait for ever."""

    class Group:
        def size(self):
            return 2

    for stored in (True, False):
        chunks = []
        for rows in (1400, 113):  # of 1,513 prototypes
            request = SimpleNamespace(
                hidden_states=torch.empty(1000, 4096, device=device),
                num_classes=rows * 30,
                vocab_size=1513 * 30,
                group=Group(),
            )
            chunks.append(list(fused.chunks_of(request, stored=stored)))
        assert chunks[0] == chunks[1]
