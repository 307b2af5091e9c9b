"""The rows of docs/ecosystem.md: what other people's tools make of a repo, without this package."""

import pytest
import torch

from harmonic_sft.models import HarmonicForCausalLM

pytestmark = pytest.mark.ecosystem

GENERATE = """
from transformers import TextStreamer, set_seed
model, tokenizer = decoder(), AutoTokenizer.from_pretrained(DECODER, trust_remote_code=True)
batch = tokenizer(TEXT, return_tensors="pt", return_token_type_ids=False)
fixed = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
found = {
    "greedy": model.generate(**batch, **fixed),
    "slow": model.generate(**batch, **fixed, use_cache=False),
    "streamed": model.generate(**batch, **fixed, streamer=TextStreamer(tokenizer)),
    "assisted": model.generate(**batch, **fixed, assistant_model=decoder()),
    "beams": model.generate(**batch, **fixed, num_beams=3),
}
generate = pipeline("text-generation", DECODER, trust_remote_code=True)
text = generate(TEXT, **fixed)[0]["generated_text"]
say(text=text, **{name: tokens[0].tolist() for name, tokens in found.items()})
"""


def test_generation_in_every_way(machine, repos):
    found = machine(GENERATE)
    model = HarmonicForCausalLM.from_pretrained(repos["decoder"])
    expected = [5, 6, 7, 8, 9]
    with torch.no_grad():
        for _ in range(6):
            logits = model(torch.tensor([expected])).logits[0, -1]
            logits[119] = -torch.inf  # min_new_tokens forbids the end of the text
            expected.append(int(logits.argmax()))
    for name in ("greedy", "slow", "streamed", "assisted"):
        assert found[name] == expected, name
    assert len(found["beams"]) == len(expected)
    assert found["text"].replace(" ", "") == "".join(f"w{token}" for token in expected)


TRAINER = """
import numpy as np
from datasets import Dataset
from transformers import DataCollatorForLanguageModeling, Trainer, TrainingArguments
model, tokenizer = decoder(), AutoTokenizer.from_pretrained(DECODER, trust_remote_code=True)
tokenizer.pad_token = "w0"
rows = Dataset.from_dict({"input_ids": [[3 + i + j for i in range(10)] for j in range(32)]})
def metrics(predictions):
    logits, labels = predictions.predictions, predictions.label_ids
    right = logits[:, :-1].argmax(-1) == labels[:, 1:]
    return {"accuracy": float(right.mean()), "width": logits.shape[-1]}
trainer = Trainer(
    model,
    TrainingArguments(
        tempfile.mkdtemp(), max_steps=12, per_device_train_batch_size=16, learning_rate=1e-2,
        report_to="none", use_cpu=True, disable_tqdm=True, logging_steps=1,
    ),
    DataCollatorForLanguageModeling(tokenizer, mlm=False), rows, rows, compute_metrics=metrics,
)
before = trainer.evaluate()
trainer.train()
after = trainer.evaluate()
trainer.save_model()
again = decoder(trainer.args.output_dir)
batch = torch.tensor(rows["input_ids"][:2])
with torch.no_grad():
    same = torch.equal(again(batch).logits, model.eval()(batch).logits)
say(before=before, after=after, same=same, dtype=str(again.dist_head.weight.dtype))
"""


def test_transformers_trainer_with_compute_metrics(machine, repos):
    found = machine(TRAINER)
    assert found["before"]["eval_width"] == 120
    assert found["after"]["eval_loss"] < found["before"]["eval_loss"] - 0.2
    assert found["after"]["eval_accuracy"] > found["before"]["eval_accuracy"]
    assert found["same"]
    assert found["dtype"] == "torch.float32"


PEFT = """
from peft import LoraConfig, PeftModel, get_peft_model
torch.manual_seed(0)
model = decoder()
lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], modules_to_save=["dist_head"])
batch = torch.tensor([[3 + i + j for i in range(10)] for j in range(8)])
peft = get_peft_model(model, lora).train()
trained = [p for p in peft.parameters() if p.requires_grad]
optimizer = torch.optim.AdamW(trained, lr=1e-2)
losses = []
for _ in range(12):
    loss = peft(input_ids=batch, labels=batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
peft.eval()
with torch.no_grad():
    expected = peft(batch).logits
    untouched = decoder()(batch).logits
    with peft.disable_adapter():
        disabled = torch.equal(peft(batch).logits, untouched)
    folder = tempfile.mkdtemp()
    peft.save_pretrained(folder)
    again = PeftModel.from_pretrained(decoder(), folder).eval()
    loaded = torch.equal(again(batch).logits, expected)
    merged_model = peft.merge_and_unload()
    merged = (merged_model(batch).logits - expected).abs().max().item()
    whole = tempfile.mkdtemp()
    merged_model.save_pretrained(whole)
    saved = torch.equal(decoder(whole)(batch).logits, merged_model(batch).logits)
change = (expected - untouched).abs().max().item()
say(losses=losses, loaded=loaded, merged=merged, saved=saved, disabled=disabled, change=change)
"""


def test_lora_of_peft(machine, repos):
    found = machine(PEFT)
    assert found["losses"][-1] < found["losses"][0] - 0.5
    assert found["change"] > 0.1
    assert found["disabled"]
    assert found["loaded"]
    assert found["merged"] < 1e-4
    assert found["saved"]


MNRL = """
from datasets import Dataset
from sentence_transformers import (
    SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments,
)
from sentence_transformers.losses import MultipleNegativesRankingLoss
torch.manual_seed(0)
model = SentenceTransformer(ENCODER, trust_remote_code=True, device="cpu")
words = [f"{a}{b}" for a in "abcdefgh" for b in "abcd"]
pairs = {
    "anchor": [" ".join(words[i : i + 3]) for i in range(24)],
    "positive": [" ".join(words[i + 3 : i + 6]) for i in range(24)],
}
trainer = SentenceTransformerTrainer(
    model,
    SentenceTransformerTrainingArguments(
        tempfile.mkdtemp(), max_steps=12, per_device_train_batch_size=24, learning_rate=1e-3,
        report_to="none", use_cpu=True, disable_tqdm=True, logging_steps=1, save_strategy="no",
    ),
    Dataset.from_dict(pairs),
    loss=MultipleNegativesRankingLoss(model),
)
trainer.train()
folder = tempfile.mkdtemp()
model.save_pretrained(folder)
again = SentenceTransformer(folder, trust_remote_code=True, device="cpu")
texts = pairs["anchor"][:4]
losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
difference = float(abs(again.encode(texts) - model.encode(texts)).max())
say(losses=losses, difference=difference, modules=[type(m).__name__ for m in again])
"""


def test_sentence_transformers_fine_tunes_and_saves(machine, repos):
    found = machine(MNRL)
    assert found["losses"][-1] < found["losses"][0] - 0.2
    assert found["difference"] < 1e-6
    assert found["modules"] == ["Transformer", "Pooling"]


MTEB = """
import mteb, numpy
from datasets import Dataset, DatasetDict
from mteb.abstasks.sts import AbsTaskSTS
from mteb.abstasks.task_metadata import TaskMetadata
from scipy.stats import spearmanr
from sentence_transformers import SentenceTransformer

words = [f"{a}{b}" for a in "abcdefgh" for b in "abcd"]
left = [" ".join(words[i : i + 3]) for i in range(20)]
# No pair of equal texts: rounding would order their cosines of 1.
right = [" ".join(words[i + 1 + i % 4 : i + 4 + i % 4]) for i in range(20)]
scores = [float(3 - i % 4) for i in range(20)]

class Words(AbsTaskSTS):
    metadata = TaskMetadata(
        name="Words", description="words", reference=None, type="STS", category="t2t",
        modalities=["text"], eval_splits=["test"], eval_langs=["eng-Latn"],
        main_score="cosine_spearman", dataset={"path": "none/none", "revision": "0"},
        date=None, domains=None, task_subtypes=None, license=None, annotations_creators=None,
        dialect=None, sample_creation=None, bibtex_citation=None,
    )
    min_score, max_score = 0, 3

    def load_data(self, *args, **kwargs):
        rows = {"sentence1": left, "sentence2": right, "score": scores}
        self.dataset = DatasetDict(test=Dataset.from_dict(rows))
        self.data_loaded = True

model = SentenceTransformer(ENCODER, trust_remote_code=True, device="cpu")
results = mteb.evaluate(model, Words(), cache=None)
one, two = model.encode(left), model.encode(right)
cosines = (one * two).sum(1) / numpy.linalg.norm(one, axis=1) / numpy.linalg.norm(two, axis=1)
expected = float(spearmanr(scores, cosines).statistic)
say(score=results.task_results[0].get_score(), expected=expected)
"""


def test_mteb(machine, repos):
    found = machine(MTEB)
    assert found["score"] == pytest.approx(found["expected"], abs=1e-4)


LM_EVAL = """
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

pairs = [("w5 w6", " w7 w8"), ("w9 w10 w11", " w40"), ("w50", " w51 w52 w53")]
requests = [
    Instance("loglikelihood", {}, pair, 0) for pair in pairs
]
model = HFLM(DECODER, trust_remote_code=True, device="cpu", batch_size=2, dtype="float32")
say(found=[list(answer) for answer in model.loglikelihood(requests, disable_tqdm=True)])
"""


def test_lm_eval_sums_our_log_likelihoods(machine, repos):
    found = machine(LM_EVAL)["found"]
    model = HarmonicForCausalLM.from_pretrained(repos["decoder"])
    for (value, greedy), (context, rest) in zip(
        found, [([5, 6], [7, 8]), ([9, 10, 11], [40]), ([50], [51, 52, 53])], strict=True
    ):
        with torch.no_grad():
            logits = model(torch.tensor([context + rest])).logits[0, len(context) - 1 : -1].double()
        expected = logits.log_softmax(-1)[torch.arange(len(rest)), rest].sum()
        assert value == pytest.approx(expected.item(), abs=1e-4)
        assert greedy == (logits.argmax(-1).tolist() == rest)


TRL_ALONE = """
import datasets
from trl import SFTConfig, SFTTrainer
tokenizer = AutoTokenizer.from_pretrained(DECODER, trust_remote_code=True)
rows = datasets.Dataset.from_dict({"input_ids": [[5, 6, 7, 8]] * 4})
args = SFTConfig(
    tempfile.mkdtemp(), max_steps=1, use_cpu=True, bf16=False, report_to="none", disable_tqdm=True
)
trainer = SFTTrainer(decoder(), args=args, train_dataset=rows, processing_class=tokenizer)
try:
    trainer.train()
    say(error=None)
except AttributeError as error:
    say(error=str(error))
"""


def test_trl_without_the_integration_stops_and_trains_no_linear_softmax(machine, repos):
    assert machine(TRL_ALONE)["error"] == "'NoneType' object has no attribute 'weight'"
