import pytest
from torch.utils.data import DataLoader

from hookline.config import ConfigError
from hookline.config.errors import MismatchError
from hookline.engine import config_errors_exit


def test_a_config_error_exits_with_2_and_prints_only_its_message(capsys):
    with pytest.raises(SystemExit) as end, config_errors_exit():
        raise ConfigError("SOLVER.BASE_LR: is wrong")
    assert end.value.code == 2
    assert capsys.readouterr().err == "error: SOLVER.BASE_LR: is wrong\n"


def test_other_errors_propagate():
    with pytest.raises(ZeroDivisionError), config_errors_exit():
        raise ZeroDivisionError


def test_an_error_of_a_loaders_worker_is_shown_without_its_traceback(capsys):
    loader = DataLoader([0], num_workers=1, collate_fn=fail)
    with pytest.raises(SystemExit), config_errors_exit():
        next(iter(loader))
    assert capsys.readouterr().err == "error: the samples do not make a batch\n"


def fail(samples):
    raise MismatchError("the samples do not make a batch")
