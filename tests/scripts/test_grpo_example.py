"""The policy loop: rewards rise, and the penalty holds the policy back."""

import pytest
import torch
from transformers import AutoConfig, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from harmonic_sft.models import HarmonicForCausalLM
from scripts import make_small_gpt
from scripts.grpo_example import PENALTIES, PROMPTS, kl_penalty, main, train


@pytest.fixture
def folder(tmp_path):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=40,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        pad_token_id=0,
        eos_token_id=1,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def gpt(tmp_path_factory):
    place = tmp_path_factory.mktemp("gpt")
    text = place / "text.txt"
    text.write_text("\n".join([*PROMPTS, "a war is a war"] * 30))
    sizes = ["--vocab-size", "290", "--hidden-size", "64", "--layers", "1"]
    folder = make_small_gpt.main([str(text), str(place / "gpt"), *sizes])
    GPT2LMHeadModel(AutoConfig.from_pretrained(folder)).save_pretrained(folder)
    return str(folder)


def run(model, **settings):
    torch.manual_seed(0)
    settings = {"steps": 25, "learning_rate": 1e-2} | settings
    return train(model, torch.tensor([[3, 4], [5, 6]]), 9, **settings)


@pytest.mark.parametrize("wrapped", [True, False])
def test_rewards_rise_and_the_penalty_holds_back(folder, wrapped):
    def load():
        if wrapped:  # a steep exponent would repeat the last token with certainty
            return HarmonicForCausalLM.from_base(folder, head={"name": "dist", "h_exp": -1.0})
        return LlamaForCausalLM.from_pretrained(folder)

    free, held = run(load(), weight=0.0), run(load(), weight=10.0)
    assert free[0].w2 == held[0].w2 == pytest.approx(0, abs=1e-6)
    first, last = (sum(step.reward for step in part) / 5 for part in (free[:5], free[-5:]))
    assert last > first + 0.1
    assert held[-1].w2 < 0.6 * free[-1].w2
    assert held[-1].reward < free[-1].reward


def test_groups_of_one_are_refused(folder):
    with pytest.raises(ValueError, match="group_size: expected at least 2, got 1"):
        run(LlamaForCausalLM.from_pretrained(folder), group_size=1)


def test_kl_against_torch():
    policy, reference = torch.randn(2, 5, 7).unbind()
    expected = torch.nn.functional.kl_div(
        reference.log_softmax(-1), policy.log_softmax(-1), reduction="none", log_target=True
    ).sum(-1)
    torch.testing.assert_close(kl_penalty(policy, reference, torch.empty(7, 2)), expected)


@pytest.mark.parametrize("penalty", PENALTIES)
def test_the_command(gpt, penalty, capsys):
    seen = main([gpt, "--penalty", penalty, "--steps", "2"])
    assert len(seen) == 2
    assert "reward" in capsys.readouterr().out


def test_a_word_of_two_tokens_is_refused(gpt):
    with pytest.raises(ValueError, match="expected one token, got ' unbelievable'"):
        main([gpt, "--word", " unbelievable"])
