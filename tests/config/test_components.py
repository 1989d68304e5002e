import pytest

from hookline.config import CfgNode, ConfigError, Registry, component, components, name_of
from hookline.config.components import ComponentKey, named_components


def test_an_entry_is_a_name_or_a_mapping():
    assert component("Net") == ("Net", {})
    assert component({"NAME": "Net"}) == ("Net", {})
    assert component({"NAME": "Net", "ARGS": None}) == ("Net", {})
    assert component({"NAME": "Net", "ARGS": {"a": 1}}) == ("Net", {"a": 1})


@pytest.mark.parametrize("entry", [{"NAME": "A", "ARG": {}}, {"ARGS": {}}, {"NAME": 3}, "", {"NAME": "A", "ARGS": [1]}])
def test_other_entries_are_errors_that_give_the_index(entry):
    with pytest.raises(ConfigError, match="entry 1: "):
        components(["A", entry])


def test_results_may_have_a_name_of_their_own_which_can_be_that_of_a_folder():
    entry = {"NAME": "Photos", "AS": "val_small"}
    named_components(["Photos", entry])
    assert (name_of("Photos"), name_of(entry), component(entry)) == ("Photos", "val_small", ("Photos", {}))
    for name in ("", "a/b", "..", None, 3):
        with pytest.raises(ConfigError, match="entry 1: AS"):
            named_components(["Photos", {"NAME": "Photos", "AS": name}])


# ---------------------------------------------------------------- component_keys

registry = Registry("PART")


@registry.register()
class Part:
    def __init__(self, cfg, size, width=1):
        self.arguments = (cfg, size, width)


def config(name="Part", args=None):
    args = {"size": 2} if args is None else args
    return CfgNode({"A": {"PART_NAME": name, "PART_ARGS": args}, "PARTS": [{"NAME": name, "ARGS": args}, "Part"]})


one = ComponentKey(registry, "A.PART_NAME", offers=("cfg", "width"))
several = ComponentKey(registry, "PARTS", offers=("cfg", "size"))


def test_components_receive_the_config_what_is_offered_and_their_arguments_in_order():
    cfg = config()
    assert one.check(cfg) == [Part]
    assert one.build(cfg, width=3).arguments == (cfg, 2, 3)
    assert several.check(cfg) == [Part, Part]
    assert [part.arguments[1] for part in several.build(cfg, size=5)] == [2, 5]
