import pytest

from hookline.config import ConfigError, component, components
from hookline.config.components import args_key, name_key


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
