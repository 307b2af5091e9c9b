"""One seed of the stacked transformer is two encoder layers of PyTorch."""

import pytest
import torch
from torch import nn

from experiments.harmonic_loss.transformer import StackedTransformer
from experiments.stacked import seeded_generators

SIZES = {"vocab_size": 31, "num_inputs": 3, "hidden_size": 16}


@pytest.fixture
def model() -> StackedTransformer:
    return StackedTransformer(seeded_generators([3, 4]), **SIZES)


def encoder_layer(block: nn.Module, seed: int) -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 2, 64, dropout=0.1, batch_first=True).eval()
    with torch.no_grad():
        layer.self_attn.in_proj_weight.copy_(block.weight_qkv[seed].T)
        layer.self_attn.in_proj_bias.copy_(block.bias_qkv[seed, 0])
        layer.self_attn.out_proj.weight.copy_(block.weight_attention[seed].T)
        layer.self_attn.out_proj.bias.copy_(block.bias_attention[seed, 0])
        layer.linear1.weight.copy_(block.weight_in[seed].T)
        layer.linear1.bias.copy_(block.bias_in[seed, 0])
        layer.linear2.weight.copy_(block.weight_out[seed].T)
        layer.linear2.bias.copy_(block.bias_out[seed, 0])
        for place, norm in enumerate((layer.norm1, layer.norm2)):
            norm.weight.copy_(block.norm_weight[seed, place, 0])
            norm.bias.copy_(block.norm_bias[seed, place, 0])
    return layer


def test_one_seed_is_two_encoder_layers_with_a_second_residual(model):
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():  # biases and norms start at 0 and 1, which would hide a mistake
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    input_ids = torch.randint(31, (2, 7, 3), generator=generator)
    hidden_states = model(input_ids, None)
    for seed in range(2):
        states = model.embedding[seed][input_ids[seed]] + model.positions[seed]
        for block in model.blocks:
            states = encoder_layer(block, seed)(states) + states
        torch.testing.assert_close(hidden_states[seed], states[:, -1], rtol=1e-4, atol=1e-5)


def test_blocks_start_as_encoder_layers_do(model):
    layer, block = nn.TransformerEncoderLayer(16, 2, 64), model.blocks[0]
    for ours, theirs in [
        (block.weight_qkv, layer.self_attn.in_proj_weight),
        (block.bias_qkv, layer.self_attn.in_proj_bias),
        (block.weight_attention, layer.self_attn.out_proj.weight),
        (block.bias_attention, layer.self_attn.out_proj.bias),
        (block.weight_in, layer.linear1.weight),
        (block.bias_in, layer.linear1.bias),
        (block.weight_out, layer.linear2.weight),
        (block.bias_out, layer.linear2.bias),
    ]:
        assert ours[0].abs().max().item() == pytest.approx(theirs.abs().max().item(), rel=0.15)
        assert ours[0].numel() == theirs.numel()


def test_dropout_draws_the_same_for_a_seed_beside_any_others(model):
    input_ids = torch.randint(31, (2, 50, 3), generator=torch.Generator().manual_seed(0))
    together = model(input_ids, seeded_generators([5, 6]))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data = parameter.data[1:]
    alone = model(input_ids[1:], seeded_generators([6]))
    torch.testing.assert_close(together[1:], alone)
    assert not torch.allclose(alone, model(input_ids[1:], None))
    assert not torch.allclose(alone, model(input_ids[1:], seeded_generators([7])))
