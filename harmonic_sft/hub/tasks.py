"""How a model card speaks of what a model predicts."""

from typing import NamedTuple

from harmonic_sft.models import HarmonicConfig


class TaskWords(NamedTuple):
    """The words of one task.

    Attributes:
        architecture: The class of the model.
        auto_class: What loads it in transformers.
        pipeline: Its tag on the Hub, which is also the name of the pipeline.
        title: Name of the task.
        tag: Further tag on the Hub.
        purpose: What the model was fine-tuned to do.
        kind: What the model is.
        choice: What the head chooses among.
        item: What the loss is a mean over.
        items: What was evaluated.
        metric: Start of the names of metrics.
        where: Which rows the evaluation kept out.
    """

    architecture: str
    auto_class: str
    pipeline: str
    title: str
    tag: str
    purpose: str
    kind: str
    choice: str
    item: str
    items: str
    metric: str
    where: str


MASKED_LM = TaskWords(
    architecture="HarmonicForMaskedLM",
    auto_class="AutoModelForMaskedLM",
    pipeline="fill-mask",
    title="Masked language modeling",
    tag="masked-language-modeling",
    purpose="to fill masked tokens",
    kind="masked language model",
    choice="token",
    item="masked token",
    items="Masked tokens",
    metric="Masked-token accuracy",
    where="documents",
)
CAUSAL_LM = TaskWords(
    architecture="HarmonicForCausalLM",
    auto_class="AutoModelForCausalLM",
    pipeline="text-generation",
    title="Causal language modeling",
    tag="causal-language-modeling",
    purpose="to predict the next token",
    kind="causal language model",
    choice="token",
    item="token",
    items="Tokens",
    metric="Next-token accuracy",
    where="documents",
)
SEQUENCE_CLASSIFICATION = TaskWords(
    architecture="HarmonicForSequenceClassification",
    auto_class="AutoModelForSequenceClassification",
    pipeline="text-classification",
    title="Text classification",
    tag="text-classification",
    purpose="to classify texts",
    kind="classifier of texts",
    choice="class",
    item="text",
    items="Texts",
    metric="Accuracy",
    where="rows",
)
TOKEN_CLASSIFICATION = TaskWords(
    architecture="HarmonicForTokenClassification",
    auto_class="AutoModelForTokenClassification",
    pipeline="token-classification",
    title="Token classification",
    tag="token-classification",
    purpose="to classify words in their context",
    kind="classifier of words",
    choice="class",
    item="word",
    items="Words",
    metric="Accuracy",
    where="rows",
)
TASKS = (MASKED_LM, CAUSAL_LM, SEQUENCE_CLASSIFICATION, TOKEN_CLASSIFICATION)


def task_words(config: HarmonicConfig) -> TaskWords:
    """Return the words of a model's task; without a known architecture it fills masked tokens."""
    names = config.architectures or []
    return next((task for task in TASKS if task.architecture in names), MASKED_LM)
