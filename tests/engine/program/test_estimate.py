import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from hookline.engine.modeling import GPT, TokenCrossEntropyLoss
from hookline.engine.modeling.summary import watching_forward
from hookline.engine.program.estimate import (
    Layout,
    Transformer,
    activation_bytes,
    flops_per_token,
    memory_per_rank,
    multiplied_parameters,
    tokens_per_second,
)

OPTIONS = {
    "gpt": {},
    "llama": {"kv_heads": 2, "positions": "rotary", "norm": "rms", "mlp": "swiglu", "mlp_width": 96, "bias": False},
}


def model_of(kind):
    torch.manual_seed(0)
    return GPT(vocab_size=300, block_size=64, width=64, depth=2, heads=4, **OPTIONS[kind])


@pytest.mark.parametrize("kind", OPTIONS)
def test_the_formula_agrees_with_counted_operations(kind):
    model = model_of(kind)
    shape = Transformer.of(model)
    tokens = torch.randint(300, (2, 64))
    with watching_forward(model) as passes, sdpa_kernel(SDPBackend.MATH):
        model(tokens)
    flops = flops_per_token(multiplied_parameters(model), shape.depth, shape.width, 64)
    assert 3 * passes[""].flops / tokens.numel() == pytest.approx(flops, rel=0.02)


@pytest.mark.parametrize("kind", OPTIONS)
def test_the_activations_agree_with_saved_tensors(kind):
    model = model_of(kind)
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    tokens = torch.randint(300, (4, 64))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        TokenCrossEntropyLoss()(model(tokens), tokens)
    scores = tokens.numel() * 300 * 4  # a gradient, and another copy of the scores
    estimate = activation_bytes(Transformer.of(model), tokens.numel(), number=4) - 2 * scores
    assert estimate == pytest.approx(sum(saved.values()), rel=0.15)


def test_embeddings_are_looked_up_and_not_multiplied_unless_they_are_tied():
    size = {"vocab_size": 300, "block_size": 64, "width": 64, "depth": 2}
    total = sum(p.numel() for p in GPT(**size).parameters())
    assert multiplied_parameters(GPT(**size)) == total - (300 + 64) * 64
    assert multiplied_parameters(GPT(**size, tie_weights=True)) == total - (300 + 64) * 64


def test_ranks_share_the_memory_of_what_is_sharded():
    alone = memory_per_rank(1000, Layout())
    assert (alone.weights, alone.gradients, alone.optimizer, alone.gathered) == (4000, 4000, 8000, 0)
    assert memory_per_rank(1000, Layout(replicate=8)) == alone
    shared = memory_per_rank(1000, Layout(replicate=2, shard=4, tensor=2), compute=2, reduce=4, units=[300, 300, 400])
    assert (shared.weights, shared.gradients, shared.optimizer) == (500, 500, 1000)
    assert shared.gathered == ((400 + 2 * 300) * 2 + (400 + 300) * 4) / 2
    assert shared.total == 2000 + shared.gathered  # the activations are not known


def test_tokens_per_second_of_llama_3_8b_are_those_of_its_formula():
    assert tokens_per_second(6 * 8e9, ranks=64, peak=989e12, mfu=0.4) == pytest.approx(527_467, rel=1e-3)
