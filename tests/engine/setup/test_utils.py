"""Helpers that code written for detectron2 imports from its ``utils``."""

import logging
import math
import pickle
import random

import numpy as np
import pytest
import torch

from hookline.config import get_cfg
from hookline.engine.setup.utils import (
    PathHandler,
    PathManager,
    PicklableWrapper,
    create_small_table,
    fixup_module_metadata,
    log_every_n,
    log_every_n_seconds,
    log_first_n,
    retry_if_cuda_oom,
    seed_all_rng,
    setup_logger,
)


def draw():
    return random.random(), np.random.rand(), torch.rand(1).item()


def test_a_seed_gives_the_same_numbers_and_no_seed_others():
    seed_all_rng(3)
    first = draw()
    seed_all_rng(3)
    assert draw() == first
    seed_all_rng()
    others = draw()
    assert all(a != b for a, b in zip(first, others, strict=True))


def test_handlers_of_the_path_manager_open_configs(tmp_path):
    class Handler(PathHandler):
        def _get_supported_prefixes(self):
            return ["mine://"]

        def _get_local_path(self, path, **kwargs):
            return str(tmp_path / path.removeprefix("mine://"))

        def _open(self, path, mode="r", **kwargs):
            return open(self._get_local_path(path), mode, **kwargs)

        def _isfile(self, path, **kwargs):
            return True

    PathManager.register_handler(Handler(), allow_override=True)
    (tmp_path / "config.yaml").write_text("SEED: 7")
    cfg = get_cfg()
    cfg.merge_from_file("mine://config.yaml")
    assert cfg.SEED == 7


def test_loggers_of_ported_code_are_set_up(tmp_path, capsys):
    logger = setup_logger(str(tmp_path))
    assert logger.name == "detectron2"
    logging.getLogger("detectron2.trainer").info("ported")
    logging.getLogger("hookline.engine").info("own")
    for text in (capsys.readouterr().out, (tmp_path / "log.txt").read_text()):
        assert "ported" in text
        assert "own" in text


def test_a_line_logs_the_first_n_times_every_n_times_and_once_in_n_seconds(caplog):
    with caplog.at_level(logging.INFO):
        for i in range(4):
            log_first_n(logging.INFO, f"a{i}", 2)
            log_first_n(logging.WARNING, "b", name="mine")
            log_first_n(logging.INFO, f"c{i // 2}", key="message")
            log_every_n(logging.INFO, f"d{i}", 3)
            log_every_n_seconds(logging.INFO, f"rare {i}", 1000)
    assert [record.getMessage() for record in caplog.records] == ["a0", "b", "c0", "d0", "rare 0", "a1", "c1", "d3"]
    assert [record.name for record in caplog.records[:2]] == [__name__, "mine"]
    with pytest.raises(ValueError, match="line"):
        log_first_n(logging.INFO, "x", key="line")


def test_a_small_table_has_one_row():
    assert create_small_table({"AP": 12.34567, "name": "box"}).split("\n") == [
        "|   AP   | name |",
        "|:------:|:----:|",
        "| 12.346 | box  |",
    ]


def test_a_function_without_memory_is_called_again_and_then_on_the_cpu(log):
    calls = []

    @retry_if_cuda_oom
    def double(x, factor=2):
        calls.append((x.device.type, factor))
        if len(calls) < 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return factor * x

    assert double(torch.ones(2), factor=3).tolist() == [3, 3]
    assert calls == [("cpu", 3)] * 3
    assert "double: the GPU is out of memory; it runs on the CPU" in log.text


def test_a_wrapped_function_is_called_in_another_process_and_a_package_names_itself():
    pytest.importorskip("cloudpickle")
    wrapped = pickle.loads(pickle.dumps(PicklableWrapper(PicklableWrapper(lambda x: x + 1))))
    assert wrapped(2) == PicklableWrapper([3]).pop() == 3
    inner = type("Inner", (), {"__module__": "package.module"})
    fixup_module_metadata("package", {"Inner": inner, "math": math, "_private": None})
    assert (inner.__module__, math.__name__) == ("package", "math")
