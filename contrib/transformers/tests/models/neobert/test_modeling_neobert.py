# Copyright 2026 the HuggingFace Team. All rights reserved.
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""Testing suite for the PyTorch NeoBERT model."""

import tempfile
import unittest

from transformers import AutoTokenizer, NeoBertConfig, is_torch_available
from transformers.testing_utils import require_torch, slow, torch_device

from ...test_configuration_common import ConfigTester
from ...test_modeling_common import ModelTesterMixin, ids_tensor, random_attention_mask
from ...test_pipeline_mixin import PipelineTesterMixin


if is_torch_available():
    import torch

    from transformers import (
        NeoBertForMaskedLM,
        NeoBertForQuestionAnswering,
        NeoBertForSequenceClassification,
        NeoBertForTokenClassification,
        NeoBertModel,
    )


class NeoBertModelTester:
    def __init__(self, parent, is_training=True):
        self.parent = parent
        self.is_training = is_training
        self.batch_size = 13
        self.seq_length = 7
        self.vocab_size = 99
        self.hidden_size = 32
        self.num_hidden_layers = 2
        self.num_attention_heads = 4
        self.num_labels = 3

    def get_config(self):
        return NeoBertConfig(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            num_hidden_layers=self.num_hidden_layers,
            num_attention_heads=self.num_attention_heads,
            intermediate_size=37,
            max_position_embeddings=64,
            classifier_dropout=0.0,
        )

    def prepare_config_and_inputs_for_common(self):
        input_ids = ids_tensor([self.batch_size, self.seq_length], self.vocab_size)
        attention_mask = random_attention_mask([self.batch_size, self.seq_length]).to(torch_device)
        return self.get_config(), {"input_ids": input_ids, "attention_mask": attention_mask}


@require_torch
class NeoBertModelTest(ModelTesterMixin, PipelineTesterMixin, unittest.TestCase):
    all_model_classes = (
        (
            NeoBertModel,
            NeoBertForMaskedLM,
            NeoBertForSequenceClassification,
            NeoBertForTokenClassification,
            NeoBertForQuestionAnswering,
        )
        if is_torch_available()
        else ()
    )
    pipeline_model_mapping = (
        {
            "feature-extraction": NeoBertModel,
            "fill-mask": NeoBertForMaskedLM,
            "text-classification": NeoBertForSequenceClassification,
            "token-classification": NeoBertForTokenClassification,
            "zero-shot": NeoBertForSequenceClassification,
        }
        if is_torch_available()
        else {}
    )
    # used in `test_torch_compile_for_training`
    _torch_compile_train_cls = NeoBertForMaskedLM if is_torch_available() else None

    def setUp(self):
        self.model_tester = NeoBertModelTester(self)
        self.config_tester = ConfigTester(self, config_class=NeoBertConfig, hidden_size=32, num_attention_heads=2)

    def test_config(self):
        self.config_tester.run_common_tests()

    def test_config_of_the_published_checkpoint(self):
        config = NeoBertConfig(max_length=1024, dim_head=64)
        self.assertEqual(config.max_position_embeddings, 1024)
        with tempfile.TemporaryDirectory() as folder:
            config.save_pretrained(folder)
            self.assertEqual(NeoBertConfig.from_pretrained(folder).max_position_embeddings, 1024)
        with self.assertRaisesRegex(Exception, "even multiple"):
            NeoBertConfig(hidden_size=36, num_attention_heads=4)

    def test_model(self):
        config, inputs = self.model_tester.prepare_config_and_inputs_for_common()
        model = NeoBertModel(config).to(torch_device).eval()
        shape = (self.model_tester.batch_size, self.model_tester.seq_length, self.model_tester.hidden_size)
        self.assertEqual(model(**inputs).last_hidden_state.shape, shape)
        self.assertEqual(model(inputs["input_ids"]).last_hidden_state.shape, shape)

    def test_for_masked_lm(self):
        config, inputs = self.model_tester.prepare_config_and_inputs_for_common()
        model = NeoBertForMaskedLM(config).to(torch_device).eval()
        outputs = model(**inputs, labels=inputs["input_ids"])
        expected = torch.nn.functional.cross_entropy(outputs.logits.flatten(0, 1), inputs["input_ids"].flatten())
        torch.testing.assert_close(outputs.loss, expected)

    def test_for_sequence_classification(self):
        config, inputs = self.model_tester.prepare_config_and_inputs_for_common()
        batch_size, num_labels = self.model_tester.batch_size, self.model_tester.num_labels
        all_labels = {
            "regression": torch.rand(batch_size, num_labels, device=torch_device),
            "single_label_classification": ids_tensor([batch_size], num_labels),
            "multi_label_classification": torch.rand(batch_size, num_labels, device=torch_device).round(),
        }
        for problem_type, labels in all_labels.items():
            config.num_labels, config.problem_type = num_labels, problem_type
            model = NeoBertForSequenceClassification(config).to(torch_device).eval()
            outputs = model(**inputs, labels=labels)
            self.assertEqual(outputs.logits.shape, (batch_size, num_labels))
            self.assertTrue(outputs.loss.isfinite())

    def test_rotation_of_interleaved_pairs(self):
        # Moving every token by the same number of positions changes nothing, in 16 bits too
        config, inputs = self.model_tester.prepare_config_and_inputs_for_common()
        positions = torch.arange(self.model_tester.seq_length, device=torch_device).unsqueeze(0)
        for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 5e-2)):
            model = NeoBertModel(config).to(torch_device, dtype).eval()
            near = model(**inputs, position_ids=positions).last_hidden_state
            far = model(**inputs, position_ids=positions + 4000).last_hidden_state
            torch.testing.assert_close(near, far, rtol=tolerance, atol=tolerance)


@require_torch
class NeoBertModelIntegrationTest(unittest.TestCase):
    @slow
    def test_inference_masked_lm(self):
        model = NeoBertForMaskedLM.from_pretrained("chandar-lab/NeoBERT", attn_implementation="sdpa")
        tokenizer = AutoTokenizer.from_pretrained("chandar-lab/NeoBERT")
        inputs = tokenizer("The capital of France is [MASK].", return_tensors="pt")
        with torch.no_grad():
            logits = model(**inputs).logits
        masked_index = inputs["input_ids"][0].tolist().index(tokenizer.mask_token_id)
        self.assertEqual(tokenizer.decode(logits[0, masked_index].argmax(dim=-1)), "paris")


if __name__ == "__main__":
    unittest.main()
