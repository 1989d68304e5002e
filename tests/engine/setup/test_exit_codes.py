import pytest

from hookline.config import ConfigError
from hookline.engine import (
    config_errors_exit,
)


def test_a_config_error_exits_with_2_and_prints_only_its_message(capsys):
    with pytest.raises(SystemExit) as end, config_errors_exit():
        raise ConfigError("SOLVER.BASE_LR: is wrong")
    assert end.value.code == 2
    assert capsys.readouterr().err == "error: SOLVER.BASE_LR: is wrong\n"


def test_other_errors_propagate():
    with pytest.raises(ZeroDivisionError), config_errors_exit():
        raise ZeroDivisionError
