"""configs/accelerate/*.yaml on two GPUs: what they train is what one GPU trains."""

import json

import pytest
import torch

from tests.decoders import save_decoder
from tests.elsewhere import ROOT
from tests.training.conftest import logged
from tests.training.processes import free_port, run_together

# By the policy of the file; `prepare` moves and shards the model.
SHARDED = """
import json, sys
from pathlib import Path
from accelerate import Accelerator
from torch.distributed.tensor import DTensor
from tests.training import sharded_session

accelerator = Accelerator()
model = sharded_session.make(Path(sys.argv[1]))
model, optimizer = accelerator.prepare(model, sharded_session.optimizer_of(model))
rank, world = accelerator.process_index, accelerator.num_processes
assert world == 1 or isinstance(model.dist_head.weight, DTensor), "nothing is sharded"
steps = range(sharded_session.STEPS)
losses = sharded_session.train(model, optimizer, steps, rank, world)
if rank == 0:
    Path(sys.argv[2]).write_text(json.dumps(losses))
"""


def launch(words, *, nodes=1, options=()):
    """Run `accelerate launch`, on every node with a GPU of its own if there are several."""
    command = ["-m", "accelerate.commands.launch", *options, "--main_process_port", free_port()]
    started = []
    for rank in range(nodes):
        one_gpu = nodes > 1 or not options[0].startswith("--config")
        own = ["--machine_rank", rank] if nodes > 1 else []
        variables = {"CUDA_VISIBLE_DEVICES": str(rank)} if one_gpu else {}
        started.append(([*command, *own, *words], variables, ROOT))
    for status, text in run_together(*started):
        assert status == 0, text[-4000:]


@pytest.mark.cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize(("name", "nodes"), [("multi_gpu", 1), ("two_machines", 2), ("fsdp2", 1)])
def test_a_file_trains_what_one_gpu_trains(name, nodes, make_yaml, tmp_path):
    file = f"--config_file={ROOT / 'configs' / 'accelerate' / name}.yaml"
    ways = {
        "one": (1, ["--num_processes=1", "--num_machines=1", "--mixed_precision=no"]),
        "two": (nodes, [file, "--num_processes=2"]),
    }
    found = {}
    for way, (count, options) in ways.items():
        if name == "fsdp2":
            program, out = tmp_path / "session.py", tmp_path / f"{way}.json"
            program.write_text(SHARDED)
            base = save_decoder("llama", tmp_path / way)
            launch([str(program), str(base), str(out)], nodes=count, options=options)
            found[way] = json.loads(out.read_text())
            continue
        path = make_yaml(training={"learning_rate": 1e-3, "max_steps": 3, "use_cpu": False})
        rows = 4 if way == "one" else 2
        words = [f"training.output_dir={tmp_path / way}"]
        words += [f"training.per_device_train_batch_size={rows}"]
        script = str(ROOT / "scripts" / "sft.py")
        launch([script, str(path), *words], nodes=count, options=options)
        run = json.loads((tmp_path / way / "results" / "train.json").read_text())
        found[way] = logged(run["history"])
    assert len(found["one"]) >= 3
    assert found["two"] == pytest.approx(found["one"], rel=1e-4)
