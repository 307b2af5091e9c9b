"""A process of a training that is sharded over several: python sharded_session.py BASE OUT."""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from harmonic_sft import HarmonicForCausalLM, HarmonicLoss
from harmonic_sft.models import DistLayer, HarmonicConfig
from harmonic_sft.training.sharding import shard_
from tests.decoders import decoder_config

STEPS, SAVED_AFTER, HEAD = 6, 3, {"name": "dist", "h_exp": -6.0}


def rows() -> torch.Tensor:
    return torch.randint(3, 100, (STEPS, 8, 12), generator=torch.Generator().manual_seed(0))


def make(base: Path | None) -> HarmonicForCausalLM:
    """A model on a base, or from scratch."""
    if base is None:
        torch.manual_seed(0)
        config = HarmonicConfig(text_config=decoder_config("llama"), head=HEAD, is_causal=True)
        model = HarmonicForCausalLM(config)
    else:
        model = HarmonicForCausalLM.from_base(str(base), head=HEAD)
    model.loss_fn = HarmonicLoss().prepare(model.dist_head)
    return model.train()


def train(model, optimizer, steps: range, rank: int = 0, world: int = 1) -> list[float]:
    """The mean loss of every step, over all processes."""
    losses = []
    for step in steps:
        own = rows()[step].chunk(world)[rank].to(model.device)
        loss = model(input_ids=own, labels=own).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        model.renormalize_prototypes_()
        total = loss.detach().clone()
        if world > 1:
            dist.all_reduce(total)
        losses.append(total.item() / world)
    return losses


def optimizer_of(model) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def main(base: Path, out: Path) -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))

    def sharded(dtype=None):
        model = make(base)
        shard_(model, mesh, dtype=dtype)
        return model

    model = sharded()
    weight = model.dist_head.weight
    found = {"sharded": isinstance(weight, DTensor), "local": list(weight.to_local().shape)}
    optimizer = optimizer_of(model)
    losses = train(model, optimizer, range(SAVED_AFTER), rank, world)
    norms = model.dist_head.weight.to_local().norm(dim=-1)
    found["norm_error"] = (norms - 1).abs().max().item()

    states = get_state_dict(model, optimizer)
    dcp.save(dict(zip(("model", "optimizer"), states, strict=True)), checkpoint_id=out / "shards")
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    whole = get_model_state_dict(model, options=options)
    if rank == 0:
        model.save_pretrained(out / "whole", state_dict=whole)
    rest = range(SAVED_AFTER, STEPS)
    found["losses"] = losses + train(model, optimizer, rest, rank, world)

    model = sharded()  # another start, from the checkpoint
    optimizer = optimizer_of(model)
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.load(states, checkpoint_id=out / "shards")
    set_state_dict(
        model,
        optimizer,
        model_state_dict=states["model"],
        optim_state_dict=states["optimizer"],
    )
    found["resumed"] = train(model, optimizer, rest, rank, world)

    model = make(None)
    shard_(model, mesh)
    found["from_scratch"] = train(model, optimizer_of(model), range(STEPS), rank, world)

    seen = []

    class Watched(DistLayer):
        def lazy_logits(self, hidden_states):
            lazy = super().lazy_logits(hidden_states)
            seen.append([str(hidden_states.dtype), str(lazy.weight.dtype), len(lazy.weight)])
            return lazy

    model = make(base)
    model.dist_head.__class__ = Watched
    shard_(model, mesh, dtype=torch.bfloat16)
    found["low"] = train(model, optimizer_of(model), range(1), rank, world)
    found["seen"] = seen[1:]  # at first `shard_` asks which kind of head it is
    (out / f"found_{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
    dist.barrier()  # a process that ends while the other still talks to it aborts, at times
    dist.destroy_process_group()
