import sys

import pytest

from hookline.config import ConfigError
from hookline.hooks import EventStorage


@pytest.fixture
def storage():
    storage = EventStorage()
    for iteration in range(4):
        storage.put_scalar("loss", 1.0 - iteration / 4, cur_iter=iteration)
    storage.put_scalar("test/accuracy", 0.5, smoothing_hint=False, cur_iter=2)
    storage.put_scalar("test/accuracy", 0.75, smoothing_hint=False, cur_iter=2)
    return storage


def test_a_history_as_arrays(storage):
    iterations, values = storage.history("loss").arrays()
    assert iterations.tolist() == [0, 1, 2, 3]
    assert values.tolist() == [1.0, 0.75, 0.5, 0.25]


def test_metrics_as_a_table(storage):
    pytest.importorskip("pandas")
    table = storage.to_pandas()
    assert list(table.columns) == ["loss", "test/accuracy"]
    assert (table.index.name, list(table.index)) == ("iteration", [0, 1, 2, 3])
    assert table["loss"].tolist() == [1.0, 0.75, 0.5, 0.25]
    assert table["test/accuracy"].dropna().to_dict() == {2: 0.75}
    assert list(storage.to_pandas("test/").index) == [2]
    assert len(EventStorage().to_pandas()) == 0


def test_without_pandas_the_error_names_the_arrays(storage, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ConfigError, match=r"pip install pandas. Without it: .*history\(name\)\.arrays\(\)"):
        storage.to_pandas()
