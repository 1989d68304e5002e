import pytest

from hookline.config import ConfigError, UnknownKeyError, suggest
from hookline.config.errors import error_text


def test_an_unknown_key_prints_its_plain_message():
    error = UnknownKeyError("unknown key 'A'")
    assert str(error) == "unknown key 'A'"
    assert isinstance(error, KeyError)
    assert isinstance(error, ConfigError)
    assert isinstance(error, ValueError)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("widht", "width"),
        ("WIDTH", "width"),
        ("SOLVER.BASE_LRR", "SOLVER.BASE_LR"),
        ("MODEL.BASE_LR", "SOLVER.BASE_LR"),
        ("base_lr", "SOLVER.BASE_LR"),
    ],
)
def test_the_nearest_name_is_suggested_if_one_is_similar(name, expected):
    candidates = ["width", "depth", "SOLVER", "SOLVER.BASE_LR", "SOLVER.GAMMA", "MODEL.NAME"]
    assert suggest(name, candidates) == f"; did you mean '{expected}'?"
    assert suggest("zebra", candidates) == suggest(name, []) == ""


def test_a_command_prints_an_error_and_its_notes_without_control_characters():
    error = ConfigError("\x1b[31mred\nsecond")
    error.add_note("a note")
    assert error_text(error) == "error: \\x1b[31mred\nsecond\na note\n"
