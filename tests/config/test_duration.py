import pickle

import pytest

from hookline.config import ConfigError, Duration


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (500, Duration(500, "it")),
        ("1e4", Duration(10000, "it")),
        ("10_000 iters", Duration(10000, "it")),
        ("500it", Duration(500, "it")),
        ("2ep", Duration(2, "ep")),
        ("0.5 epochs", Duration(0.5, "ep")),
        ("45s", Duration(45, "s")),
        ("30min", Duration(1800, "s")),
        ("1.5h", Duration(5400, "s")),
        ("1.1h", Duration(1.1 * 3600, "s")),
        (Duration(3, "ep"), Duration(3, "ep")),
        *((never, Duration(0, "it")) for never in (0, None, "", "0", "0ep", "0s", 0.0)),
    ],
)
def test_each_form_is_read_and_written_again(text, expected):
    duration = Duration.parse(text)
    assert duration == Duration.parse(str(duration)) == pickle.loads(pickle.dumps(duration)) == expected
    assert bool(duration) == (expected.value > 0)


@pytest.mark.parametrize("bad", [-1, True, 1.5, "1.5it", "5 parsecs", "ep", [], "inf"])
def test_anything_else_is_an_error_and_a_length_is_no_time(bad):
    for parse in (Duration.parse, Duration.parse_length):
        with pytest.raises(ConfigError):
            parse(bad)
    with pytest.raises(ConfigError, match="30min"):
        Duration.parse_length("30min")


def test_a_part_of_the_run_is_a_fraction_or_a_length():
    assert [Duration.parse_part(x) for x in (0.1, "0.1", 5, "2ep")] == [0.1, 0.1, Duration(5), Duration(2, "ep")]
    for bad in (1.5, -0.1, "30min", True, "x"):
        with pytest.raises(ConfigError):
            Duration.parse_part(bad)


def test_iterations():
    assert Duration.parse(500).iterations() == 500
    assert Duration.parse("2ep").iterations(23) == 46
    assert Duration.parse("0.1ep").iterations(70) == 7
    assert Duration.parse("0.001ep").iterations(10) == 1
    assert Duration.parse("0ep").iterations() == 0
    with pytest.raises(ConfigError, match="2ep"):
        Duration.parse("2ep").iterations(None)
    with pytest.raises(ConfigError, match="2h"):
        Duration.parse("2h").iterations(10)
