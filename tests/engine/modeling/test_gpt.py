import torch

from hookline.engine.modeling import GPT


def small(**kwargs):
    torch.manual_seed(0)
    return GPT(vocab_size=11, block_size=8, width=16, depth=2, heads=2, **kwargs).eval()


def test_a_token_is_predicted_only_from_previous_tokens():
    model, tokens = small(), torch.randint(11, (1, 8))
    changed = tokens.clone()
    changed[0, 5] = (changed[0, 5] + 1) % 11
    before, after = model(tokens), model(changed)
    assert before.shape == (1, 11, 8)  # as losses expect it
    assert torch.allclose(before[:, :, :5], after[:, :, :5], atol=1e-6)
    assert not torch.allclose(before[:, :, 5:], after[:, :, 5:], atol=1e-3)


def test_heads_of_queries_share_those_of_keys():
    fused, separate, grouped = small(), small(kv_heads=2), small(kv_heads=1)
    tokens, weights = torch.randint(11, (2, 8)), fused.state_dict()
    for name in list(weights):
        if ".qkv." in name:
            for part, chunk in zip(("query", "key", "value"), weights.pop(name).chunk(3), strict=True):
                weights[name.replace("qkv", part)] = chunk
    separate.load_state_dict(weights)
    assert torch.allclose(fused(tokens), separate(tokens), atol=1e-6)
    weights = grouped.state_dict()
    for name, value in weights.items():
        if ".key." in name or ".value." in name:
            weights[name] = torch.cat([value, value])
    separate.load_state_dict(weights)
    assert torch.allclose(grouped(tokens), separate(tokens), atol=1e-6)
