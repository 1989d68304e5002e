import io

import pytest
import torch
from torch import nn

from hookline.engine.checkpoint import Checkpointer, save_weights


def test_weights_alone_go_to_a_path(tmp_path):
    model = nn.Linear(2, 1)
    save_weights(model, tmp_path / "net.pth")
    assert [path.name for path in tmp_path.iterdir()] == ["net.pth"]
    assert set(torch.load(tmp_path / "net.pth", weights_only=True)) == {"model"}
    other = nn.Linear(2, 1)
    Checkpointer(other).load(str(tmp_path / "net.pth"))
    assert torch.equal(other.weight, model.weight)


def test_weights_alone_go_to_a_file_object():
    model = nn.DataParallel(nn.Linear(2, 1))
    save_weights(model, buffer := io.BytesIO())
    buffer.seek(0)
    saved = torch.load(buffer, weights_only=True)["model"]
    assert torch.equal(saved["weight"], model.module.weight)


def test_state_that_is_not_plain_is_named(tmp_path):
    class Odd(nn.Linear):
        def get_extra_state(self):
            return object()

    with pytest.raises(TypeError, match="_extra_state"):
        save_weights(Odd(1, 1), tmp_path / "net.pth")
    assert not list(tmp_path.iterdir())
