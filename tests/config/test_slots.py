import pytest

from hookline.config import CfgNode, ConfigError, Registry
from hookline.config.slots import Slot

registry = Registry("PART")


@registry.register()
class Part:
    def __init__(self, cfg, size, width=1):
        if size < 0:
            raise ValueError("size is negative")
        self.arguments = (cfg, size, width)


def config(name="Part", args=None):
    args = {"size": 2} if args is None else args
    return CfgNode({"A": {"PART_NAME": name, "PART_ARGS": args}, "PARTS": [{"NAME": name, "ARGS": args}, "Part"]})


one = Slot(registry, "A.PART_NAME", offers=("cfg", "width"))
several = Slot(registry, "PARTS", offers=("cfg", "size"))


def test_a_component_receives_the_config_what_is_offered_and_its_arguments():
    cfg = config()
    assert one.check(cfg) == [Part]
    assert one.build(cfg, width=3).arguments == (cfg, 2, 3)


def test_a_list_of_components_is_built_in_order():
    cfg = config()
    assert several.check(cfg) == [Part, Part]
    assert [part.arguments[1] for part in several.build(cfg, size=5)] == [2, 5]


@pytest.mark.parametrize(
    ("slot", "key"), [(one, r"A\.PART_ARGS\.siz:.*did you mean 'size'"), (several, r"PARTS\[0\]\.ARGS\.siz:")]
)
def test_a_wrong_argument_is_found_without_building(slot, key):
    with pytest.raises(ConfigError, match=key):
        slot.check(config(args={"siz": 2}))


def test_an_empty_name_is_skipped_by_the_check_and_refused_by_the_build():
    assert one.check(config("")) == []
    with pytest.raises(ConfigError, match=r"A\.PART_NAME: no part is named"):
        one.build(config(""))


def test_an_error_of_the_constructor_names_the_key_on_request():
    cfg = config(args={"size": -1})
    with pytest.raises(ValueError, match=r"^size is negative"):
        one.build(cfg)
    with pytest.raises(ConfigError, match=r"^A\.PART_ARGS of Part: ValueError: size is negative"):
        one.try_build(cfg)
