"""Describing and comparing checkpoints."""

import json

import pytest
import torch
from torch import nn

from hookline.config import ConfigError, get_cfg
from hookline.engine.checkpoint import Checkpointer
from hookline.engine.export.inspection import compare_checkpoints, hash_weights, inspect_checkpoint


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))


class Trainer:
    """Return the state of a trainer."""

    def __init__(self, iteration=9, lr=0.5, averaged=False):
        model = net()
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(4, 2)).sum().backward()
        optimizer.step()
        cfg = get_cfg()
        cfg.SOLVER.BASE_LR = lr
        cfg.SOLVER.OPTIMIZER.NAME = "AdamW"
        hooks = {"LRScheduler": {"last_epoch": iteration}}
        if averaged:
            hooks["EMA"] = {"averaged_model": net(5).state_dict(), "evaluate": True}
        self.state = {
            "iteration": iteration,
            "optimizer": optimizer.state_dict(),
            "hooks": hooks,
            "data": {"epoch": 2},
            "run": {"config": cfg.dump()},
        }

    def state_dict(self):
        return self.state


def save(folder, name="model", model=None, **trainer):
    Checkpointer(model or net(), str(folder), trainer=Trainer(**trainer)).save(name)
    return str(folder / f"{name}.pth")


# ---------------------------------------------------------------------------- the hash


def test_the_hash_covers_names_dtypes_shapes_and_bits():
    weights = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor(3)}
    same = {"b": torch.tensor(3), "a": torch.tensor([1.0, 2.0])}
    assert hash_weights(weights) == hash_weights(same)
    assert len(hash_weights(weights)) == 64
    others = [
        {"a": torch.tensor([1.0, 2.0]), "c": torch.tensor(3)},
        {"a": torch.tensor([[1.0, 2.0]]), "b": torch.tensor(3)},
        {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor(3, dtype=torch.int32)},
        {"a": torch.tensor([1.0, torch.nextafter(torch.tensor(2.0), torch.tensor(3.0))]), "b": torch.tensor(3)},
        {"a": torch.tensor([1.0, 2.0])},
    ]
    assert len({hash_weights(one) for one in (weights, *others)}) == 6
    assert hash_weights({"a": torch.tensor([0.0])}) != hash_weights({"a": torch.tensor([-0.0])})


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(2, 3).t(),
        torch.ones(4, dtype=torch.bfloat16)[::2],
        torch.tensor(True),
        torch.zeros(0, 3),
        torch.ones(1, 2, 4, 4).to(memory_format=torch.channels_last),
        torch.ones(2, requires_grad=True),
        torch.ones(2, dtype=torch.complex64),
    ],
)
def test_the_hash_does_not_depend_on_memory_layout(tensor):
    assert hash_weights({"a": tensor}) == hash_weights({"a": tensor.detach().clone().contiguous()})


# ---------------------------------------------------------------------------- one


def test_the_content_of_a_checkpoint_is_described(tmp_path):
    path = save(tmp_path / "run")
    report = inspect_checkpoint(str(tmp_path / "run"))
    assert report["file"] == path
    assert (report["iteration"], report["epoch"]) == (9, 2)
    weights = report["weights"]
    assert (weights["count"], weights["elements"]) == (7, 6 + 3 + 4 * 3 + 1)
    assert weights["megabytes"] == pytest.approx((21 * 4 + 8) / 1e6)
    assert weights["dtypes"] == ["float32", "int64"]
    assert weights["sha256"] == hash_weights(net().state_dict())
    assert report["averaged"] is None
    assert report["optimizer"]["kind"] == "AdamW"
    assert report["optimizer"]["tensors"] == 12
    assert report["hooks"] == {"LRScheduler": ["last_epoch"]}
    assert report["config"] == {"SOLVER.OPTIMIZER.NAME": ["SGD", "AdamW"], "SOLVER.BASE_LR": [0.001, 0.5]}
    json.dumps(report)


def test_averaged_weights_are_described(tmp_path):
    report = inspect_checkpoint(save(tmp_path, averaged=True))
    assert report["averaged"]["sha256"] == hash_weights(net(5).state_dict())


def test_a_plain_state_dict_has_only_weights(tmp_path):
    torch.save(net().state_dict(), tmp_path / "weights.pth")
    report = inspect_checkpoint(str(tmp_path / "weights.pth"))
    assert report["weights"]["count"] == 7
    for name in ("iteration", "epoch", "averaged", "optimizer"):
        assert report[name] is None
    for name in ("hooks", "config"):
        assert not report[name]


def test_a_flipped_bit_is_found(tmp_path):
    path = tmp_path / "model.pth"
    save(tmp_path)
    whole = path.read_bytes()
    place = whole.index(net()[0].weight.detach().numpy().tobytes())
    path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
    with pytest.raises(ConfigError, match=r"model\.pth is damaged"):
        inspect_checkpoint(str(path))


@pytest.mark.parametrize("call", [inspect_checkpoint, lambda path: compare_checkpoints(path, path)])
def test_a_tiny_file_with_a_huge_tensor_is_an_error_that_names_it(tmp_path, call):
    torch.save({"w": torch.zeros(1).expand(10**13)}, tmp_path / "huge.pth")
    with pytest.raises(ConfigError, match=r"huge\.pth: the weight w of shape .*40,000,000,000,000 bytes.* holds 4 of"):
        call(str(tmp_path / "huge.pth"))
    torch.save({"w": torch.zeros(1).expand(6)}, tmp_path / "small.pth")
    call(str(tmp_path / "small.pth"))


# ---------------------------------------------------------------------------- two


def test_equal_weights_are_equal_whatever_else_differs(tmp_path):
    report = compare_checkpoints(save(tmp_path / "a"), save(tmp_path / "b", iteration=10, lr=0.25))
    assert report["equal"]
    assert report["same"] == 7
    assert report["config"] == {"SOLVER.BASE_LR": [0.5, 0.25]}
    json.dumps(report)


def test_differences_are_sorted_largest_first(tmp_path):
    model = net()
    with torch.no_grad():
        model[0].bias[1] += 0.5
        model[1].weight += 0.25
    report = compare_checkpoints(save(tmp_path / "a"), save(tmp_path / "b", model=model))
    assert not report["equal"]
    assert [name for name, _, _ in report["changed"]] == ["0.bias", "1.weight"]
    assert report["changed"][0][1:] == pytest.approx([0.5, 0.5 / 3])
    assert report["changed"][1][1:] == pytest.approx([0.25, 0.25])
    assert report["same"] == 5


def test_missing_weights_and_other_shapes_and_dtypes_are_reported(tmp_path):
    old = {"a": torch.ones(2), "b": torch.ones(2), "c": torch.ones(2), "d": torch.ones(2)}
    new = {"b": torch.ones(3), "c": torch.ones(2).half(), "d": torch.ones(2), "e": torch.ones(1)}
    for name, weights in (("old", old), ("new", new)):
        torch.save(weights, tmp_path / name)
    report = compare_checkpoints(str(tmp_path / "old"), str(tmp_path / "new"))
    assert not report["equal"]
    assert (report["missing"], report["added"], report["same"]) == (["a"], ["e"], 1)
    assert report["shapes"] == {"b": [[2], [3]]}
    assert report["dtypes"] == {"c": ["float32", "float16"]}


def test_nan_equals_itself_and_is_the_largest_difference(tmp_path):
    nan = float("nan")
    for name, weights in (("a", {"w": [nan], "v": [1.0]}), ("b", {"w": [nan], "v": [9.0]}), ("c", {"w": [1.0]})):
        torch.save({key: torch.tensor(value) for key, value in {"v": [1.0], **weights}.items()}, tmp_path / name)
    assert [one[0] for one in compare_checkpoints(str(tmp_path / "a"), str(tmp_path / "b"))["changed"]] == ["v"]
    assert compare_checkpoints(str(tmp_path / "a"), str(tmp_path / "c"))["changed"][0][0] == "w"
    assert compare_checkpoints(str(tmp_path / "b"), str(tmp_path / "c"))["changed"][0][0] == "w"


def test_averaged_weights_are_compared_on_request(tmp_path):
    a, b = save(tmp_path / "a", averaged=True), save(tmp_path / "b", model=net(3), averaged=True)
    assert not compare_checkpoints(a, b)["equal"]
    assert compare_checkpoints(a, b, weights_from="averaged")["equal"]
    with pytest.raises(ConfigError, match="no averaged weights"):
        compare_checkpoints(a, save(tmp_path / "c"), weights_from="averaged")
