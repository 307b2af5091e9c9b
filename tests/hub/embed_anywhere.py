"""Run where harmonic_sft is not installed: sentence embeddings of repos, as JSON."""

import json
import sys
from importlib.util import find_spec

from sentence_transformers import SentenceTransformer

assert find_spec("harmonic_sft") is None
found = {}
for repo in sys.argv[2:]:
    model = SentenceTransformer(repo, trust_remote_code=True)
    found[repo] = model.encode([sys.argv[1]])[0].tolist()
    found[f"{repo} length"] = model.max_seq_length
sys.stdout.write(json.dumps(found))
