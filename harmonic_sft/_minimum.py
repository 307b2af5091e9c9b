"""The oldest versions this package works with; older ones are an ImportError that says so."""

import torch
import transformers
from packaging.version import Version

MINIMUM = {"torch": "2.10", "transformers": "5.10.1"}  # as in pyproject.toml

for _name, _found in (("torch", torch.__version__), ("transformers", transformers.__version__)):
    if Version(_found) < Version(MINIMUM[_name]):
        raise ImportError(
            f"{_name}: expected version {MINIMUM[_name]} or newer, got {_found}. "
            f"Run pip install '{_name}>={MINIMUM[_name]}', and restart the kernel of a notebook"
        )
