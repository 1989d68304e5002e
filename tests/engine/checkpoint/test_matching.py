"""Matching names of weights, and reporting those that do not fit."""

import numpy as np
import pytest
import torch
from torch import nn

from hookline.config import ConfigError
from hookline.engine.checkpoint import Checkpointer
from hookline.engine.checkpoint.matching import group, load_weights, plain_name


def net(seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential()
    model.add_module("backbone", nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)))
    model.add_module("head", nn.Linear(3, 4))
    return model


def equal(a, b):
    a, b = a.state_dict(), b.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def weights(model=None):
    return dict((model or net()).state_dict())


# ---------------------------------------------------------------------------- names


@pytest.mark.parametrize(
    "prefix",
    [
        "module.",
        "model.",
        "_orig_mod.",
        "_forward_module.",
        "module.model.",
        "model._orig_mod.",
        "module.module.model.",
    ],
)
def test_prefixes_are_removed_when_names_match_without_them(prefix):
    model = net(1)
    report = load_weights(model, {prefix + name: value for name, value in weights().items()})
    assert equal(model, net())
    assert report.exact
    assert report.loaded == report.total == 9


def test_a_prefix_is_removed_when_only_some_names_have_it():
    model = net(1)
    found = {f"model.{name}": value for name, value in weights().items()} | {"criterion.weight": torch.ones(4)}
    report = load_weights(model, found)
    assert equal(model, net())
    assert report.unexpected == ["criterion.weight"]
    assert report.prefix == "model."


def test_a_prefix_of_the_models_own_names_is_kept():
    def wrapped(seed):
        outer = nn.Module()
        outer.model, outer.extra = net(seed), nn.Linear(2, 2)
        return outer

    model = wrapped(1)
    assert load_weights(model, weights(wrapped(0))).exact
    assert equal(model, wrapped(0))


def test_unexpected_names_are_reported_as_in_the_file():
    found = {f"module.{name}": value for name, value in weights().items()} | {"module.other": torch.ones(1)}
    assert load_weights(net(1), found).unexpected == ["module.other"]


def test_wrapper_names_are_ignored():
    assert plain_name("_orig_mod.a._fsdp_wrapped_module.b._checkpoint_wrapped_module.weight") == "a.b.weight"
    assert plain_name("my_orig_mod.weight") == "my_orig_mod.weight"


def test_names_match_by_suffix_if_the_file_requests_it():
    model = nn.Module()
    model.body = net(1)
    found = {name: value.numpy() for name, value in weights().items()}
    report = load_weights(model, found, by_suffix=True)
    assert report.exact
    assert equal(model.body, net())


def test_an_ambiguous_suffix_is_not_matched():
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2), "c": nn.Linear(2, 2)})
    found = {"weight": torch.ones(2, 2), "bias": torch.ones(2), "a.weight": torch.ones(2, 2)}
    report = load_weights(model, found, by_suffix=True)
    assert report.loaded == 1
    assert sorted(report.unexpected) == ["bias", "weight"]


def test_a_detectron2_checkpoint_is_a_warm_start(tmp_path):
    model = nn.Module()
    model.body = net(1)
    torch.save(
        {"model": {n: v.numpy() for n, v in weights().items()}, "__author__": "x", "matching_heuristics": True},
        tmp_path / "d2.pth",
    )
    checkpointer = Checkpointer(model)
    checkpointer.load(str(tmp_path / "d2.pth"), [])
    assert equal(model.body, net())
    assert checkpointer.missing_keys == []


# ---------------------------------------------------------------------------- values


def test_numbers_are_converted_to_the_models_dtype():
    model = net(1)
    halves = {name: v.half() if v.is_floating_point() else v for name, v in weights().items()}
    report = load_weights(model, halves)
    assert report.converted == {("float16", "float32"): 8}
    assert model.head.weight.dtype == torch.float32
    assert torch.equal(model.head.weight, halves["head.weight"].float())
    assert "8 converted from float16 to float32" in report.summary()


def test_complex_weights_are_not_loaded_into_real_ones():
    model = nn.Linear(2, 2)
    report = load_weights(model, {"weight": torch.ones(2, 2, dtype=torch.complex64), "bias": torch.zeros(2)})
    assert report.mismatched == [("weight", "complex64", "float32")]


def test_tied_weights_need_only_one_of_their_names():
    def tied(seed):
        model = net(seed)
        model.add_module("tail", nn.Linear(3, 4))
        model.tail.weight = model.head.weight
        return model

    model, found = tied(1), weights(tied(0))
    del found["tail.weight"]
    report = load_weights(model, found)
    assert report.exact
    assert report.loaded == report.total == 11
    assert model.tail.weight is model.head.weight
    assert torch.equal(model.tail.weight, found["head.weight"])


def test_lazy_weights_get_the_files_shape():
    model = nn.Sequential(nn.LazyLinear(4))
    report = load_weights(model, {"0.weight": torch.ones(4, 7), "0.bias": torch.zeros(4)})
    assert report.exact
    assert model[0].weight.shape == (4, 7)


class Counting(nn.Linear):
    seen = 0

    def get_extra_state(self):
        return {"seen": self.seen}

    def set_extra_state(self, state):
        self.seen = state["seen"]


def test_extra_state_is_loaded():
    one, other = Counting(2, 2), Counting(2, 2)
    one.seen = 5
    report = load_weights(other, one.state_dict())
    assert other.seen == 5
    assert (report.exact, report.total) == (True, 2)


class Renamed(nn.Module):
    """In version 1 its weight was called "old" and had half the value."""

    _version = 2

    def __init__(self):
        super().__init__()
        self.new = nn.Parameter(torch.zeros(2))

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *args):
        if local_metadata.get("version") is None or local_metadata["version"] < 2:
            key = "old" if prefix + "old" in state_dict else "new"
            state_dict[f"{prefix}new"] = 2 * state_dict.pop(prefix + key)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)


def test_a_module_converts_weights_of_its_earlier_version():
    found = nn.Sequential(Renamed(), nn.Linear(1, 1)).state_dict()
    found = type(found)((f"module.{name}", value) for name, value in found.items())
    found["module.0.old"] = torch.ones(2)
    del found["module.0.new"]
    found._metadata = {"": {"version": 1}, "module": {"version": 1}, "module.0": {"version": 1}}
    model = nn.Sequential(Renamed(), nn.Linear(1, 1))
    assert load_weights(model, found).exact
    assert torch.equal(model[0].new, torch.full((2,), 2.0))


def test_weights_without_versions_have_the_current_version():
    model = nn.Sequential(Renamed())
    assert load_weights(model, {"0.new": torch.ones(2)}).exact
    assert torch.equal(model[0].new, torch.ones(2))


def test_a_model_with_versioned_modules_is_loaded_unchanged(tmp_path):
    model, other = nn.Sequential(Renamed()), nn.Sequential(Renamed())
    with torch.no_grad():
        model[0].new.fill_(3.0)
    Checkpointer(model, str(tmp_path)).save("model")
    Checkpointer(other, str(tmp_path)).resume_or_load("")
    assert torch.equal(other[0].new, torch.full((2,), 3.0))


# ---------------------------------------------------------------------------- what does not fit


def misfit():
    found = weights()
    del found["backbone.0.weight"], found["backbone.0.bias"]
    found["head.weight"], found["head.bias"] = torch.ones(7, 3), torch.ones(7)
    found["extra.fc.weight"], found["extra.fc.bias"], found["scale"] = torch.ones(1), torch.ones(1), torch.ones(1)
    return found


def test_weights_that_do_not_fit_are_reported_and_not_changed():
    model, before = net(1), net(1)
    report = load_weights(model, misfit())
    assert report.missing == ["backbone.0.weight", "backbone.0.bias"]
    assert report.unexpected == ["extra.fc.weight", "extra.fc.bias", "scale"]
    assert report.mismatched == [("head.weight", (7, 3), (4, 3)), ("head.bias", (7,), (4,))]
    assert (report.loaded, report.total) == (5, 9)
    for name in (*report.missing, "head.weight", "head.bias"):
        assert torch.equal(model.state_dict()[name], before.state_dict()[name])
    assert torch.equal(model.backbone[1].weight, net().backbone[1].weight)


def test_each_kind_of_difference_is_one_message_grouped_by_module(tmp_path, log):
    path = str(tmp_path / "weights.pth")
    torch.save(misfit(), path)
    checkpointer = Checkpointer(net(1))
    checkpointer.load(path, [])
    assert [(r.levelname, r.getMessage()) for r in log.records] == [
        ("INFO", f"Loaded 5 of the model's 9 weights from {path}"),
        (
            "WARNING",
            f"{path}: weights not in the file, left as the model was built (2):\n  backbone.0.{{bias, weight}}",
        ),
        (
            "WARNING",
            f"{path}: weights of another shape, left as the model was built (2):\n"
            "  head.weight: (7, 3) in the file, (4, 3) in the model\n"
            "  head.bias: (7,) in the file, (4,) in the model",
        ),
        ("WARNING", f"{path}: weights not in the model, ignored (3):\n  extra.fc.{{bias, weight}}\n  scale"),
    ]
    assert sorted(checkpointer.missing_keys) == ["backbone.0.bias", "backbone.0.weight", "head.bias", "head.weight"]


def test_a_long_list_is_truncated():
    lines = group(f"layer{index}.weight" for index in range(100)).splitlines()
    assert len(lines) == 41
    assert lines[-1] == "  ... and 60 more lines"


def test_strict_loading_raises_on_any_difference(tmp_path):
    path = str(tmp_path / "weights.pth")
    torch.save(misfit(), path)
    with pytest.raises(ConfigError) as info:
        Checkpointer(net(1)).load(path, [], strict=True)
    for words in ("weights.pth does not fit the model exactly", "backbone.0.{bias, weight}", "(7, 3)", "extra.fc"):
        assert words in str(info.value)
    torch.save(weights(), path)
    model = net(1)
    Checkpointer(model).load(path, [], strict=True)
    assert equal(model, net())


def test_weights_of_another_model_are_an_error_and_do_not_change_the_model():
    model, before = net(1), net(1)
    with pytest.raises(ConfigError, match=r"(?s)none of its weights has a name .*ignored \(1\):\n  conv\.weight"):
        load_weights(model, {"conv.weight": torch.ones(2)})
    with pytest.raises(ConfigError, match=r"head\.weight: \(9, 9\) in the file, \(4, 3\) in the model"):
        load_weights(model, {"head.weight": torch.ones(9, 9)})
    with pytest.raises(ConfigError, match="none of its weights"):
        load_weights(model, {})
    assert equal(model, before)


def test_a_model_without_weights_takes_any_file():
    assert load_weights(nn.ReLU(), {"a": torch.ones(1)}).unexpected == ["a"]


def test_a_model_that_refuses_its_state_is_an_error_that_names_the_file():
    class Refusing(Counting):
        def set_extra_state(self, state):
            raise RuntimeError("of another kind")

    with pytest.raises(ConfigError, match=r"net\.pth does not fit the model: (.|\n)*of another kind"):
        load_weights(Refusing(2, 2), Counting(2, 2).state_dict(), path="net.pth")


def test_a_load_file_method_written_for_fvcore_works(tmp_path):
    class Ported(Checkpointer):
        def _load_file(self, filename):
            return {"model": {name: np.asarray(value) for name, value in weights().items()}, "note": filename}

    (tmp_path / "file.xyz").write_text("")
    model = net(1)
    rest = Ported(model).load(str(tmp_path / "file.xyz"), [])
    assert equal(model, net())
    assert rest == {"note": str(tmp_path / "file.xyz")}


def test_a_path_may_ask_for_matching_by_suffix(tmp_path):
    path = str(tmp_path / "weights.pth")
    torch.save({"model": weights()}, path)
    model = nn.Module()
    model.body = net(1)
    with pytest.raises(ConfigError):
        Checkpointer(model).load(path)
    Checkpointer(model).load(f"{path}?matching_heuristics=True")
    assert equal(model.body, net())


@pytest.mark.parametrize("query", ["matching=True", "matching_heuristics=yes", "matching_heuristics=True&more=1"])
def test_other_queries_of_a_local_path_are_refused(query, tmp_path):
    with pytest.raises(ConfigError, match=r"may end with \?matching_heuristics=True, but not with"):
        Checkpointer(nn.Linear(1, 1)).load(f"{tmp_path}/weights.pth?{query}")
