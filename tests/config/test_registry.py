import sys
from typing import Any, Literal

import pytest
import torch

from hookline.config import CfgNode, ConfigError, Registry, UnknownKeyError, configurable, locate


class ConvNet:
    def __init__(self, width: int, num_classes: int = 10, betas: "tuple[float, float]" = (0.9, 0.99), act: str = None):  # noqa: RUF013
        self.args = (width, num_classes, betas, act)


def linear(params, lr: float, momentum=0.0):
    return params, lr, momentum


def anything(**kwargs):
    return kwargs


@pytest.fixture
def registry():
    registry = Registry("MODEL")
    for target in (ConvNet, linear, anything):
        registry.register(target)
    return registry


def test_register_works_as_decorator_and_call():
    registry = Registry("THING")

    @registry.register
    def bare():
        pass

    @registry.register(name="other")
    def named():
        pass

    assert registry.register(max, name="maximum") is max
    assert dict(registry) == {"bare": bare, "other": named, "maximum": max}


def test_a_name_that_is_taken_is_an_error_that_locates_both_except_in_a_notebook(registry):
    registry.register(ConvNet)  # the same again is no problem

    def other():
        pass

    with pytest.raises(ConfigError, match=rf"'ConvNet' .*{__name__}\.ConvNet, .*other"):
        registry.register(other, name="ConvNet")
    cell = "@registry.register()\nclass Again:\n    version = {}\n"
    for version in (1, 2):  # a cell of a notebook that runs twice replaces its class
        exec(cell.format(version), {"registry": registry, "__name__": "__main__"})
    assert registry.get("Again").version == 2
    with pytest.raises(ConfigError, match="'Again'"):
        exec(cell.format(3), {"registry": registry, "__name__": "elsewhere"})


def test_names_of_modules_are_imported(registry):
    assert registry.get("hookline.config:CfgNode") is CfgNode
    assert registry.get("hookline.config.CfgNode") is CfgNode
    assert registry.get("hookline.config:CfgNode.load_yaml_with_base") == CfgNode.load_yaml_with_base
    assert locate("os.path:join") is locate("os.path.join")


@pytest.mark.parametrize("name", ["no_such_package.mod:Net", "no_such_package.Net", "hookline.config:CfgNod", ".."])
def test_names_of_modules_that_do_not_exist(registry, name):
    for call in (locate, registry.build):
        with pytest.raises(UnknownKeyError) as error:
            call(name)
        assert isinstance(error.value, ImportError) or call != locate


class Kind:
    pass


class OfTheKind(Kind):
    pass


def make(kind: str):
    return OfTheKind() if kind == "right" else 3


@pytest.fixture
def of_a_kind(monkeypatch):
    monkeypatch.setitem(sys.modules, "this_module", sys.modules[__name__])
    return Registry("MODEL", Kind)


@pytest.mark.parametrize("name", ["builtins:eval", "antigravity:x"])
def test_the_standard_library_has_no_components_and_is_not_imported(of_a_kind, name):
    before = set(sys.modules)
    with pytest.raises(ConfigError, match=rf"^MODEL\.NAME: '{name}'"):
        of_a_kind.build(name, {"command": "true"}, key="MODEL.NAME")
    assert set(sys.modules) == before


def test_classes_of_the_kind_and_factory_functions_are_accepted(of_a_kind):
    for name, args in (("OfTheKind", {}), ("make", {"kind": "right"})):
        assert isinstance(of_a_kind.build(f"this_module:{name}", args), OfTheKind)
    with pytest.raises(ConfigError, match=r"^MODEL\.NAME: 'this_module:make'"):
        of_a_kind.build("this_module:make", {"kind": "wrong"}, key="MODEL.NAME")


def test_the_working_directory_is_searched_last(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    (tmp_path / "my_own_nets.py").write_text("class Net:\n    pass\n")
    assert locate("my_own_nets:Net").__module__ == "my_own_nets"
    assert sys.path[-1] == str(tmp_path)
    path = list(sys.path)
    with pytest.raises(UnknownKeyError):
        locate("not_here:Net")
    assert sys.path == path


def test_offered_values_are_passed_if_named_and_arguments_take_precedence(registry):
    offered = {"lr": 0.1, "other": 3}
    assert registry.build("linear", positional=("P",), offered=offered) == ("P", 0.1, 0.0)
    assert registry.build("linear", {"lr": 0.5}, positional=("P",), offered=offered) == ("P", 0.5, 0.0)


def test_configurable_targets_take_config_and_arguments():
    registry = Registry("MODEL")

    @registry.register()
    class Net:
        @configurable
        def __init__(self, width: int, depth: int = 1):
            self.args = width, depth

        @classmethod
        def from_config(cls, cfg, scale=1):
            return {"width": cfg.WIDTH * scale}

    offered = {"cfg": CfgNode({"WIDTH": 4})}
    assert registry.build("Net", offered=offered).args == (4, 1)
    assert registry.build("Net", {"depth": 3, "scale": 2}, offered=offered).args == (8, 3)
    assert registry.build("Net", {"width": 3}).args == (3, 1)
    with pytest.raises(ConfigError, match=r"M\.ARGS\.dept: "):
        registry.build("Net", {"dept": 3}, offered=offered, key="M.NAME")
    with pytest.raises(ConfigError, match="'width'"):
        registry.build("Net", {"depth": 3})


def test_numbers_become_a_tensor_where_the_signature_says_tensor(registry):
    @registry.register()
    def weighted(weight: torch.Tensor | None = None, bins: torch.Tensor | list[float] | None = None) -> Any:
        return weight, bins

    weight, bins = registry.build("weighted", {"weight": [1, 2], "bins": [0.5]})
    assert torch.equal(weight, torch.tensor([1.0, 2.0]))
    assert bins == [0.5]  # a list is what the signature allows
    assert registry.build("weighted", {"weight": 3})[0].item() == 3


def test_a_value_that_is_none_of_a_literals_is_an_error(registry):
    @registry.register()
    def chosen(mode: Literal["max", "min"] | None = None) -> Any:
        return mode

    assert [registry.build("chosen", {"mode": mode}) for mode in ("max", None)] == ["max", None]
    with pytest.raises(ConfigError, match=r"^MODEL\.ARGS\.mode: 'mx' is not one of 'max', 'min'"):
        registry.build("chosen", {"mode": "mx"}, key="MODEL.NAME")


def test_nodes_are_passed_as_dicts(registry):
    args = CfgNode({"sub": {"a": [1]}})
    args.freeze()
    built = registry.build("anything", args)
    assert type(built["sub"]) is dict
    built["sub"]["a"].append(2)
    assert args.sub.a == [1]
