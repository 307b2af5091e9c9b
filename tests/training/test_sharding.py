"""fully_shard on two processes; accelerate would make DDP of FSDP on CPUs without a word."""

import json

import pytest
import torch
from accelerate import FullyShardedDataParallelPlugin
from accelerate.commands.config import load_config_from_file
from accelerate.utils.fsdp_utils import fsdp2_prepare_auto_wrap_policy

from harmonic_sft import HarmonicForCausalLM, HarmonicLoss
from harmonic_sft.training.sharding import shard_
from tests.decoders import V, save_decoder
from tests.elsewhere import ROOT, run_python
from tests.training import sharded_session


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return save_decoder("llama", tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def out(base, tmp_path_factory):
    """What two processes have left."""
    folder = tmp_path_factory.mktemp("out")
    launch = ("-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone")
    run_python(*launch, sharded_session.__file__, base, folder)
    return folder


@pytest.fixture(scope="module")
def found(out):
    results = [json.loads((out / f"found_{rank}.json").read_text()) for rank in range(2)]
    # Without this, every other number would be one of plain data parallelism.
    assert [result["sharded"] for result in results] == [True, True]
    assert [result["local"] for result in results] == [[V // 2, 32]] * 2
    return results


@pytest.fixture(scope="module")
def alone(base):
    """The losses of one process, and where it stood when the two saved."""
    model = sharded_session.make(base)
    optimizer = sharded_session.optimizer_of(model)
    return sharded_session.train(model, optimizer, range(sharded_session.STEPS))


@pytest.mark.slow
def test_losses_are_those_of_one_process(found, alone):
    assert found[0]["losses"] == pytest.approx(alone, rel=1e-5)
    assert alone[-1] < alone[0] - 0.2
    assert found[0]["losses"] == found[1]["losses"]


@pytest.mark.slow
def test_losses_from_scratch_are_those_of_one_process(found):
    model = sharded_session.make(None)
    optimizer = sharded_session.optimizer_of(model)
    alone = sharded_session.train(model, optimizer, range(sharded_session.STEPS))
    assert found[0]["from_scratch"] == pytest.approx(alone, rel=1e-5)
    assert alone[-1] < alone[0] - 0.1


@pytest.mark.slow
def test_prototypes_are_normalized_on_every_shard(found):
    assert max(result["norm_error"] for result in found) < 1e-6


@pytest.mark.slow
def test_a_resumed_run_continues_on_the_same_numbers(found):
    assert found[0]["resumed"] == found[0]["losses"][sharded_session.SAVED_AFTER :]


@pytest.mark.slow
def test_a_whole_checkpoint_loads_on_one_process(found, out):
    model = HarmonicForCausalLM.from_pretrained(out / "whole")
    rows = sharded_session.rows()[sharded_session.SAVED_AFTER]
    with torch.no_grad():
        loss = HarmonicLoss()(
            model.dist_head,
            model.model(input_ids=rows).last_hidden_state[:, :-1].flatten(0, 1),
            rows[:, 1:].flatten(),
        ).mean()
    expected = found[0]["losses"][sharded_session.SAVED_AFTER]
    assert loss.item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_the_head_is_whole_and_float32_under_a_backbone_in_16_bits(found):
    for result in found:
        assert result["seen"] == [["torch.bfloat16", "torch.float32", V]]
        assert result["low"] == pytest.approx(result["losses"][:1], rel=5e-3)
        assert result["low"] != result["losses"][:1]


def test_a_tied_head_in_16_bits_is_refused(base):
    model = HarmonicForCausalLM.from_base(str(base), tie=True)
    with pytest.raises(ValueError, match="dtype: expected None for a tied head, which is float32"):
        shard_(model, None, dtype=torch.bfloat16)


def test_a_head_whose_weighted_losses_would_not_train_it_is_refused(base):
    model = HarmonicForCausalLM.from_base(str(base), head={"name": "power"})
    with pytest.raises(ValueError, match=r"expected a head of dot products, .*weighted losses"):
        shard_(model, None)


def test_accelerate_would_shard_every_block(base):
    """By the policy of configs/accelerate/fsdp2.yaml; the head then belongs to the rest."""
    model = HarmonicForCausalLM.from_base(str(base))
    settings = load_config_from_file(str(ROOT / "configs/accelerate/fsdp2.yaml")).fsdp_config
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=settings["fsdp_version"],
        auto_wrap_policy=settings["fsdp_auto_wrap_policy"],
        reshard_after_forward=settings["fsdp_reshard_after_forward"],
    )
    plugin.set_auto_wrap_policy(model)  # as `prepare` does; accelerate 1.10 needs it
    policy = fsdp2_prepare_auto_wrap_policy(plugin, model)
    found = [name for name, module in model.named_modules() if policy(module)]
    assert found == ["model.backbone.layers.0", "model.backbone.layers.1"]
