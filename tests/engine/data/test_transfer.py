from collections import OrderedDict, defaultdict, namedtuple

import torch

from hookline.engine.data import move_to_device

Pair = namedtuple("Pair", "x y")


class Movable:
    device = None

    def to(self, device):
        self.device = torch.device(device)
        return self


def test_every_tensor_moves_and_the_structure_stays():
    t = torch.zeros(2)
    batch = {
        "tuple": (t, "name"),
        "pair": Pair(t, [t, 3]),
        "ordered": OrderedDict(b=t, a=None),
        "default": defaultdict(list, k=t),
        "own": Movable(),
    }
    moved = move_to_device(batch, "meta")
    assert moved["tuple"][0].is_meta
    assert moved["tuple"][1] == "name"
    assert isinstance(moved["pair"], Pair)
    assert moved["pair"].y[0].is_meta
    assert moved["pair"].y[1] == 3
    assert list(moved["ordered"]) == ["b", "a"]
    assert moved["default"].default_factory is list
    assert moved["own"].device.type == "meta"
    assert not batch["default"]["k"].is_meta


def test_tensors_already_on_the_device_are_not_copied():
    t = torch.zeros(2)
    assert move_to_device([t], "cpu")[0] is t
