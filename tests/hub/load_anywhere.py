"""Run where harmonic_sft is not installed: load repos with transformers alone, save the logits."""

import json
import sys
from importlib.util import find_spec

import torch
from safetensors.torch import save_file
from transformers import AutoModel, AutoModelForMaskedLM, AutoTokenizer, pipeline

assert find_spec("harmonic_sft") is None
text, target, *repos = sys.argv[1:]
tensors, found = {}, {}
for repo in repos:
    name, _, revision = repo.partition("@")
    options = {"revision": revision or None, "trust_remote_code": True}
    model = AutoModelForMaskedLM.from_pretrained(name, **options)
    tokenizer = AutoTokenizer.from_pretrained(name, **options)
    batch = tokenizer([text], return_tensors="pt")
    with torch.no_grad():
        tensors[repo] = model(**batch).logits
        backbone = AutoModel.from_pretrained(name, **options)
        tensors[f"{repo} hidden"] = backbone(**batch).last_hidden_state
    saved = f"{target} {name.replace('/', ' ')}"
    model.save_pretrained(saved)  # of the form head, a whole checkpoint
    again = AutoModelForMaskedLM.from_pretrained(saved, trust_remote_code=True)
    with torch.no_grad():
        tensors[f"{repo} saved again"] = again(**batch).logits
    fill = pipeline("fill-mask", model=model, tokenizer=tokenizer, top_k=3)
    features = pipeline("feature-extraction", model=backbone, tokenizer=tokenizer)
    tensors[f"{repo} features"] = torch.tensor(features(text))
    found[repo] = {
        "fill": fill(text),
        "h_exp": model.h_exp,
        "dtypes": sorted({str(p.dtype) for p in model.parameters()}),
        "module": type(model).__module__,
    }
save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, target)
sys.stdout.write(json.dumps(found))
