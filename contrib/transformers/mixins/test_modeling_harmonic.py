"""transformers' own model tests over NeoBERT as this package has it and over harmonic models."""

import copy
import unittest
from typing import Any, ClassVar

import pytest
from tests.generation.test_utils import GenerationTesterMixin
from tests.test_configuration_common import ConfigTester
from tests.test_modeling_common import ModelTesterMixin, ids_tensor, random_attention_mask
from transformers import BertConfig, GPT2Config, LlamaConfig, PreTrainedConfig
from transformers.models.auto import modeling_auto
from transformers.testing_utils import torch_device

from harmonic_sft import (
    HarmonicConfig,
    HarmonicForCausalLM,
    HarmonicForMaskedLM,
    HarmonicForQuestionAnswering,
    HarmonicForSequenceClassification,
    HarmonicForTokenClassification,
    HarmonicModel,
    NeoBERTConfig,
    NeoBERTForMaskedLM,
    NeoBERTModel,
)

# The tests tell by these tables which labels a class takes; ours are in Auto classes alone.
modeling_auto.MODEL_MAPPING_NAMES |= {"harmonic": "HarmonicModel", "neobert": "NeoBERTModel"}
modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES |= {
    "harmonic": "HarmonicForMaskedLM",
    "neobert": "NeoBERTForMaskedLM",
}
for table, name in (
    (modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, "HarmonicForCausalLM"),
    (modeling_auto.MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES, "HarmonicForQuestionAnswering"),
    (
        modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
        "HarmonicForSequenceClassification",
    ),
    (modeling_auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES, "HarmonicForTokenClassification"),
):
    table["harmonic"] = name

SIZES: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 37,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
CLASSIFIERS = (
    HarmonicForSequenceClassification,
    HarmonicForTokenClassification,
    HarmonicForQuestionAnswering,
)


class Tester:
    """What the mixins ask for: a configuration and a batch."""

    def __init__(self, parent: unittest.TestCase, config: PreTrainedConfig, base_model_class: type):
        self.parent = parent
        self.config = config
        self.base_model_class = base_model_class
        self.is_training = True
        self.batch_size = 13
        self.seq_length = 7
        self.num_labels = 3
        sizes = config.get_text_config()
        self.hidden_size = sizes.hidden_size
        self.num_hidden_layers = sizes.num_hidden_layers
        self.num_attention_heads = sizes.num_attention_heads
        self.vocab_size = sizes.vocab_size

    def get_config(self) -> PreTrainedConfig:
        return copy.deepcopy(self.config)

    def prepare_config_and_inputs_for_common(self) -> tuple[PreTrainedConfig, dict[str, Any]]:
        shape = [self.batch_size, self.seq_length]
        attention_mask = random_attention_mask(shape).to(torch_device)
        inputs = {"input_ids": ids_tensor(shape, self.vocab_size), "attention_mask": attention_mask}
        return self.get_config(), inputs


class NeoBERTTest(ModelTesterMixin, unittest.TestCase):
    all_model_classes = (NeoBERTModel, NeoBERTForMaskedLM)
    test_can_init_all_missing_weights_before_2023 = True  # it looks for a year in our files
    _torch_compile_train_cls = NeoBERTForMaskedLM

    def setUp(self):
        self.model_tester = Tester(self, NeoBERTConfig(**SIZES), NeoBERTModel)
        self.config_tester = ConfigTester(
            self, config_class=NeoBERTConfig, hidden_size=32, num_attention_heads=2
        )

    def test_config(self):
        self.config_tester.run_common_tests()


class EncoderTest(ModelTesterMixin, unittest.TestCase):
    """Over NeoBERT."""

    all_model_classes: ClassVar[Any] = (HarmonicModel, HarmonicForMaskedLM, *CLASSIFIERS)
    body: ClassVar[PreTrainedConfig] = NeoBERTConfig(**SIZES)
    is_causal = False
    test_can_init_all_missing_weights_before_2023 = True
    _is_composite = True

    def setUp(self):
        config = HarmonicConfig(text_config=self.body.to_dict(), is_causal=self.is_causal)
        self.model_tester = Tester(self, config, HarmonicModel)

    def test_problem_types(self):
        # A head of prototypes makes one probability over all classes, and refuses the others.
        self.model_tester.config.head = {"name": "linear"}
        super().test_problem_types()

    def test_training_gradient_checkpointing_use_reentrant_true(self):
        # It gives the block above a frozen one no gradient.
        with pytest.raises(ValueError, match="use_reentrant: expected False"):
            HarmonicModel(self.model_tester.config).gradient_checkpointing_enable(
                {"use_reentrant": True}
            )


class BertTest(EncoderTest):
    body = BertConfig(**SIZES)


class DecoderTest(GenerationTesterMixin, EncoderTest):
    """Over Llama."""

    all_model_classes = (HarmonicModel, HarmonicForCausalLM, *CLASSIFIERS)
    body = LlamaConfig(**SIZES, num_key_value_heads=2, bos_token_id=1, eos_token_id=2)
    is_causal = True

    def setUp(self):
        super().setUp()
        # Without these two, which nothing but the tests reads, they leave out caches.
        self.model_tester.config.use_cache = True
        HarmonicForCausalLM._can_compile_fullgraph = True


class GPT2Test(DecoderTest):
    body = GPT2Config(
        vocab_size=99,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    test_can_init_all_missing_weights_before_2023 = False  # GPT-2's own initialization cannot
