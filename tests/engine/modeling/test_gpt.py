import pytest
import torch

from hookline.engine.modeling import GPT


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
