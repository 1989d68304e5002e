import pytest

from hookline.hooks.common.monitor import Monitor


@pytest.mark.parametrize("metric", ["my_module:points/accuracy", "total_loss"])
def test_a_metric_of_imported_data_is_no_function(metric):
    monitor = Monitor(metric)
    assert (monitor.name, monitor.function) == (metric, None)
