"""Command lines of LazyConfigs."""

import math

import pytest

from hookline.config import ConfigError
from hookline.config.overrides import parse_override


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", 1),
        ("-3", -3),
        ("1_000", 1000),
        ("007", "007"),
        ("0.1", 0.1),
        ("1e-3", 0.001),
        ("-inf", -math.inf),
        ("true", True),
        ("False", False),
        ("null", None),
        ("", ""),
        ("cpu", "cpu"),
        ("yes", "yes"),
        ("out/a-b:c", "out/a-b:c"),
        ("a=b", "a=b"),
        ("two words", "two words"),
        ('"1"', "1"),
        ("'it\\'s, [1]'", "it's, [1]"),
        ("[1, 2.5,a]", [1, 2.5, "a"]),
        ("[]", []),
        ("[[1],[2,'x,y']]", [[1], [2, "x,y"]]),
        ("{a:1,b:[2],c:{d:x}}", {"a": 1, "b": [2], "c": {"d": "x"}}),
        ("${train.seed}", "${train.seed}"),
        ("${join:a,b}", "${join:a,b}"),
    ],
)
def test_values(text, value):
    assert parse_override(f"a.b={text}") == ("", "a.b", value)


def test_a_sign_adds_a_key():
    assert parse_override("+train.new=1") == ("+", "train.new", 1)
    assert parse_override("++train.new=1") == ("+", "train.new", 1)
    assert parse_override("a[0].b=1") == ("", "a[0].b", 1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("train.max_iter", "write overrides as key=value"),
        ("=1", "write overrides as key=value"),
        ("~train.seed", "keys cannot be removed"),
        ("a=1,2", r"',2' is not expected; write a list as \[a,b\]"),
        ("a=[1,2", "']' is missing"),
        ("a=[1,,2]", "a value is missing before ','"),
        ("a={b}", "write a dict as {key:value}"),
        ("a='b' c", "'c' is not expected; quote"),
        ("a=[1] 2", "'2' is not expected"),
    ],
)
def test_what_is_written_otherwise_is_named(text, message):
    with pytest.raises(ConfigError, match=message):
        parse_override(text)
