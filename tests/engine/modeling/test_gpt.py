import copy
import re

import pytest
import torch

from hookline.config import get_cfg
from hookline.engine.modeling import GPT, checkpoint_activations
from hookline.engine.modeling.gpt import _rotation


def small(**kwargs):
    torch.manual_seed(0)
    return GPT(vocab_size=11, block_size=8, width=16, depth=2, heads=2, **kwargs).eval()


def test_scores_have_the_shape_that_losses_expect():
    tokens = torch.randint(11, (3, 6))
    scores = small()(tokens)
    assert scores.shape == (3, 11, 6)
    assert torch.nn.CrossEntropyLoss()(scores, tokens).isfinite()


def test_a_token_is_predicted_only_from_previous_tokens():
    model, tokens = small(), torch.randint(11, (1, 8))
    changed = tokens.clone()
    changed[0, 5] = (changed[0, 5] + 1) % 11
    before, after = model(tokens), model(changed)
    assert torch.allclose(before[:, :, :5], after[:, :, :5], atol=1e-6)
    assert not torch.allclose(before[:, :, 5:], after[:, :, 5:], atol=1e-3)


def test_it_memorises_a_text():
    model = small().train()
    tokens = torch.arange(9).remainder(11).repeat(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(60):
        loss = torch.nn.functional.cross_entropy(model(tokens[:, :-1]), tokens[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.1


def test_dropout_is_active_only_in_training_mode():
    model, tokens = small(dropout=0.5), torch.randint(11, (1, 8))
    assert torch.equal(model(tokens), model(tokens))
    model.train()
    assert not torch.equal(model(tokens), model(tokens))


def test_wrong_sizes_are_refused():
    with pytest.raises(ValueError, match="multiple of heads, 3"):
        GPT(width=16, heads=3)
    with pytest.raises(ValueError, match="9 tokens is longer than block_size, 8"):
        small()(torch.zeros(1, 9, dtype=torch.int64))


LLAMA = {
    "kv_heads": 1,
    "positions": "rotary",
    "norm": "rms",
    "mlp": "swiglu",
    "mlp_width": 24,
    "bias": False,
    "tie_weights": True,
}


def test_as_many_heads_of_keys_as_of_queries_are_ordinary_attention():
    fused, separate = small(), small(kv_heads=2)
    weights = fused.state_dict()
    for name in list(weights):
        if ".qkv." in name:
            for part, chunk in zip(("query", "key", "value"), weights.pop(name).chunk(3), strict=True):
                weights[name.replace("qkv", part)] = chunk
    separate.load_state_dict(weights)
    tokens = torch.randint(11, (2, 8))
    assert torch.allclose(fused(tokens), separate(tokens), atol=1e-6)


def test_heads_of_queries_share_those_of_keys():
    grouped, full = small(kv_heads=1), small(kv_heads=2)
    weights = grouped.state_dict()
    for name, value in weights.items():
        if ".key." in name or ".value." in name:
            weights[name] = torch.cat([value, value])
    full.load_state_dict(weights)
    tokens = torch.randint(11, (2, 8))
    assert torch.allclose(grouped(tokens), full(tokens), atol=1e-6)


def test_rotary_attention_depends_on_distances_only():
    block, x = small(**LLAMA).blocks[0], torch.randn(1, 5, 16)
    first, later = (block(x, _rotation(torch.arange(5) + start, 8, 10_000.0)) for start in (0, 100))
    assert torch.allclose(first, later, atol=1e-5)
    assert not torch.allclose(first, block(x, _rotation(torch.arange(5) * 2, 8, 10_000.0)), atol=1e-5)


def test_the_8b_config_has_the_size_of_llama_3_8b():
    cfg = get_cfg()
    cfg.merge_from_file("language/gpt_8b.yaml")
    with torch.device("meta"):
        model = GPT(**cfg.MODEL.ARGS)
    assert sum(p.numel() for p in model.parameters()) == 8_030_261_248  # arXiv:2407.21783; huggingface's 8.03B


def test_blocks_recompute_their_activations():
    plain = small(**LLAMA).train()
    changed = copy.deepcopy(plain)
    checkpoint_activations(changed, ["TransformerBlock"])
    tokens = torch.randint(11, (2, 8))
    for model in (plain, changed):
        model(tokens).square().mean().backward()
    for one, two in zip(plain.parameters(), changed.parameters(), strict=True):
        assert torch.equal(one.grad, two.grad)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kv_heads": 3}, "heads must be a multiple of kv_heads, 3, not 2"),
        ({"kv_heads": 0}, "heads must be a multiple of kv_heads, 0, not 2"),
        ({"norm": "batch"}, 'norm must be "layer" or "rms", not \'batch\''),
        ({"positions": "rotary", "width": 6}, "rotary positions need an even width / heads, not 3"),
    ],
)
def test_wrong_options_are_refused(options, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        GPT(**{"width": 16, "heads": 2, **options})
