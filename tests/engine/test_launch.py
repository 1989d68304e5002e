import pytest

from hookline.config import ConfigError
from hookline.engine import launch


def test_one_process_runs_the_function_and_returns_its_result(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert launch(lambda a, b: a + b, 1, args=(2, 3)) == 5
    assert launch(lambda: "done", 1, num_machines=1, machine_rank=0, dist_url="auto") == "done"


def test_an_error_of_the_function_comes_through(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(ZeroDivisionError):
        launch(lambda: 1 / 0, 1)


@pytest.mark.parametrize(("gpus", "machines"), [(2, 1), (1, 2)])
def test_more_than_one_process_is_an_error_that_says_what_to_do(monkeypatch, gpus, machines):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(ConfigError, match=f"--num-gpus {gpus} --num-machines {machines}.*use --num-gpus 1"):
        launch(pytest.fail, gpus, machines)


def test_torchrun_with_more_than_one_process_is_an_error(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="without torchrun"):
        launch(pytest.fail, 1)
