import json
import os

from hookline.engine import (
    default_writers,
)
from hookline.hooks import CommonMetricPrinter, JSONWriter, TensorboardXWriter


def test_the_default_writers_are_console_json_and_tensorboard(tmp_path):
    from hookline.hooks import EventStorage

    writers = default_writers(str(tmp_path), 10)
    assert [type(writer) for writer in writers] == [CommonMetricPrinter, JSONWriter, TensorboardXWriter]
    with EventStorage() as storage:
        storage.put_scalar("loss", 1)
        for writer in writers:
            writer.write()
            writer.close()
    assert json.loads((tmp_path / "metrics.json").read_text()) == {"iteration": 0, "loss": 1.0}
    assert any(name.startswith("events.out") for name in os.listdir(tmp_path))
