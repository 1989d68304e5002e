import pytest

from hookline.config import ConfigError, component, components, name_of
from hookline.config.components import args_key, name_key, named_components


@pytest.mark.parametrize(
    ("name", "args"),
    [("NAME", "ARGS"), ("LR_SCHEDULER_NAME", "LR_SCHEDULER_ARGS"), ("SAMPLER_TRAIN", "SAMPLER_ARGS")],
)
def test_names_and_arguments_are_paired(name, args):
    assert args_key(name) == args
    assert name_key(f"A.{args}") == f"A.{name}"


def test_other_keys_name_no_component():
    assert args_key("WEIGHTS") is None
    assert args_key("FILENAME") is None
    assert name_key("A.WEIGHTS") == "A.WEIGHTS"


def test_an_entry_is_a_name_or_a_mapping():
    assert component("Net") == ("Net", {})
    assert component({"NAME": "Net"}) == ("Net", {})
    assert component({"NAME": "Net", "ARGS": None}) == ("Net", {})
    assert component({"NAME": "Net", "ARGS": {"a": 1}}) == ("Net", {"a": 1})


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"NAME": "A", "ARG": {}}, "not 'ARG'; did you mean 'ARGS'"),
        ({"ARGS": {}}, "has no NAME"),
        ({"NAME": 3}, "NAME is a string"),
        ("", "NAME is a string"),
        ({"NAME": "A", "ARGS": [1]}, "ARGS of 'A' are a mapping"),
        (3, "not 3"),
    ],
)
def test_other_entries_are_errors_that_give_the_index(entry, message):
    with pytest.raises(ConfigError, match=message):
        component(entry)
    with pytest.raises(ConfigError, match=f"entry 1: .*{message}"):
        components(["A", entry])


def test_a_single_name_is_not_a_list():
    with pytest.raises(ConfigError, match=r"write \[Net\]"):
        components("Net")


def test_results_may_have_a_name_of_their_own():
    entry = {"NAME": "Photos", "AS": "val_small"}
    named_components(["Photos", entry])
    assert (name_of("Photos"), name_of(entry), component(entry)) == ("Photos", "val_small", ("Photos", {}))


@pytest.mark.parametrize("name", ["", "a/b", "..", None, 3])
def test_such_a_name_can_be_one_of_a_folder(name):
    with pytest.raises(ConfigError, match="entry 1: AS is a name of letters"):
        named_components(["Photos", {"NAME": "Photos", "AS": name}])


def test_other_components_have_no_name_of_their_own():
    with pytest.raises(ConfigError, match="entry 0: AS names test sets and metrics only"):
        components([{"NAME": "EMA", "AS": "mean"}])
