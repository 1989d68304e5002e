"""Matching names of weights, and reporting those that do not fit."""

import numpy as np
import pytest
import torch
from small_runs import same
from torch import nn

from hookline.config import ConfigError
from hookline.engine.checkpoint import Checkpointer
from hookline.engine.checkpoint.matching import LoadReport, load_weights


def net(seed=0, tied=False):
    torch.manual_seed(seed)
    model = nn.Sequential()
    model.add_module("backbone", nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)))
    model.add_module("head", nn.Linear(3, 4))
    if tied:
        model.add_module("tail", nn.Linear(3, 4))
        model.tail.weight = model.head.weight
    return model


def wrapped(seed):
    outer = nn.Module()
    outer.body = net(seed)
    return outer


WEIGHTS = dict(net().state_dict())


def prefixed(prefix):
    return {prefix + name: value for name, value in WEIGHTS.items()}


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "_forward_module.", "model._orig_mod.", "module.model."])
@pytest.mark.parametrize("other", [(), ("criterion.weight",)])
def test_prefixes_are_removed_when_names_match_without_them(prefix, other):
    model = net(1)
    report = load_weights(model, {**prefixed(prefix), **dict.fromkeys(other, torch.ones(4))})
    assert same(model, net())
    assert (report.loaded, report.total, report.unexpected_keys) == (9, 9, list(other))


def test_names_match_by_suffix_where_the_file_or_the_path_asks_for_it(tmp_path):
    """Files of detectron2 ask for it by a key, users by a query."""
    arrays = {name: value.numpy() for name, value in WEIGHTS.items()}
    torch.save({"model": arrays, "__author__": "x", "matching_heuristics": True}, tmp_path / "d2.pth")
    torch.save({"model": WEIGHTS}, tmp_path / "plain.pth")
    for path in ("d2.pth", "plain.pth?matching_heuristics=True"):
        model = wrapped(1)
        checkpointer = Checkpointer(model)
        checkpointer.load(f"{tmp_path}/{path}", [])
        assert same(model.body, net())
        assert checkpointer.load_report.missing_keys == []
    for path in ("plain.pth", "plain.pth?matching=True"):  # another query is part of the name
        with pytest.raises(ConfigError, match=r"plain\.pth"):
            Checkpointer(wrapped(1)).load(f"{tmp_path}/{path}", [])


def test_numbers_are_converted_to_the_models_dtype_and_complex_ones_are_not():
    model = net(1)
    halves = {name: v.half() if v.is_floating_point() else v for name, v in WEIGHTS.items()}
    assert not load_weights(model, halves).differences()
    assert torch.equal(model.head.weight, halves["head.weight"].float())
    halves["head.bias"] = torch.ones(4, dtype=torch.complex64)
    assert load_weights(model, halves).incorrect_shapes == [("head.bias", torch.complex64, torch.float32)]


def test_tied_weights_need_only_one_of_their_names():
    model, found = net(1, tied=True), dict(net(tied=True).state_dict())
    del found["tail.weight"]
    report = load_weights(model, found)
    assert not report.differences()
    assert report.loaded == report.total == 11
    assert model.tail.weight is model.head.weight
    assert torch.equal(model.tail.weight, found["head.weight"])


class Counting(nn.Linear):
    seen = 0

    def get_extra_state(self):
        return {"seen": self.seen}

    def set_extra_state(self, state):
        self.seen = state["seen"]


def test_extra_state_is_loaded():
    one, other = Counting(2, 2), Counting(2, 2)
    one.seen = 5
    assert not load_weights(other, one.state_dict()).differences()
    assert other.seen == 5


MISFIT = {name: value for name, value in WEIGHTS.items() if not name.startswith("backbone.0")}
MISFIT |= {"head.weight": torch.ones(7, 3), "head.bias": torch.ones(7), "extra.bias": torch.ones(1)}


def test_each_kind_of_misfit_is_one_warning_and_an_error_if_strict(tmp_path, log):
    path, model, before = str(tmp_path / "weights.pth"), net(1), net(1).state_dict()
    torch.save(MISFIT, path)
    checkpointer = Checkpointer(model)
    checkpointer.load(path, [])
    not_loaded = ["backbone.0.bias", "backbone.0.weight", "head.bias", "head.weight"]
    report = checkpointer.load_report
    assert sorted([*report.missing_keys, *(name for name, _, _ in report.incorrect_shapes)]) == not_loaded
    assert all(torch.equal(model.state_dict()[name], before[name]) for name in not_loaded)
    assert torch.equal(model.backbone[1].weight, net().backbone[1].weight)
    warnings = [record.getMessage() for record in log.records if record.levelname == "WARNING"]
    expected = ("backbone.0.bias", "(7, 3) in the file, (4, 3) in the model", "extra.bias")
    assert all(words in warning for words, warning in zip(expected, warnings, strict=True))
    with pytest.raises(ConfigError) as info:
        Checkpointer(net(1)).load(path, [], strict=True)
    assert all(words in str(info.value) for words in ("weights.pth", *expected))
    (text,) = LoadReport(100, 0, [f"layer{index}.weight" for index in range(100)]).differences()
    assert len(text.splitlines()) == 42  # a long list is truncated


def test_weights_of_another_model_are_an_error_and_do_not_change_the_model():
    model, before = net(1), net(1)
    for found in ({"conv.weight": torch.ones(2)}, {"head.weight": torch.ones(9, 9)}, {}):
        with pytest.raises(ConfigError, match=next(iter(found), "none of its weights")):
            load_weights(model, found)
    assert same(model, before)
    assert load_weights(nn.ReLU(), {"a": torch.ones(1)}).unexpected_keys == [
        "a"
    ]  # a model without weights takes any file


def test_a_load_file_method_written_for_fvcore_works(tmp_path):
    class Ported(Checkpointer):
        def _load_file(self, filename):
            return {"model": {name: np.asarray(value) for name, value in WEIGHTS.items()}, "note": filename}

    (tmp_path / "file.xyz").write_text("")
    model = net(1)
    assert Ported(model).load(str(tmp_path / "file.xyz"), []) == {"note": str(tmp_path / "file.xyz")}
    assert same(model, net())
