import pytest

from hookline.config import ConfigError, component, components, name_of
from hookline.config.components import named_components


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
