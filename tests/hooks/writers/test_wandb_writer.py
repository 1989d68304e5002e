"""Offline runs of Weights & Biases, read from their files."""

import json
import struct
import sys
import time

import pytest
from metric_runs import TRACKED, at, put_media
from small_runs import config_trainer, kill_at

from hookline.config import ConfigError
from hookline.hooks import WandbWriter


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    pytest.importorskip("wandb")  # here, since it takes a second
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.delenv("WANDB_MODE", raising=False)


def writers(**arguments):
    return "LOG.WRITERS", ["JSONWriter", {"NAME": "WandbWriter", "ARGS": {"mode": "offline", **arguments}}]


def records(path):
    """Read a .wandb file: blocks of 32 KiB with records, each with checksum, length and kind."""
    from wandb.proto import wandb_internal_pb2

    data, at, record = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        if at + 7 + length > len(data):
            return  # being written
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield wandb_internal_pb2.Record.FromString(record)
            record = b""


def offline_runs(folder):
    """Return id, config, rows and exit code of each offline run, in their order, once W&B's process has written it."""
    for _ in range(600):
        runs = [read_run(path) for path in sorted((folder / "wandb").glob("offline-run-*/*.wandb"))]
        if all(run["exit"] is not None for run in runs):
            break
        time.sleep(0.1)
    return runs


def read_run(path):
    run = {"config": {}, "rows": [], "exit": None}
    for record in records(path):
        kind = record.WhichOneof("record_type")
        if kind == "run":
            run |= {"id": record.run.run_id, "project": record.run.project, "name": record.run.display_name}
        elif kind == "config":
            run["config"] |= {item.key: json.loads(item.value_json) for item in record.config.update}
        elif kind == "history":
            items = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
            run["rows"].append({key: json.loads(value) for key, value in items.items() if key[0] != "_"})
        elif kind == "exit":
            run["exit"] = record.exit.exit_code
    return run


def test_a_run_has_config_metrics_and_media_and_a_resume_continues_it(tmp_path):
    trainer = config_trainer(tmp_path / "digits", *TRACKED, *writers(project="demo", name="digits"))
    trainer.register_hooks([at(2, put_media)])
    kill_at(trainer, 8)
    config_trainer(tmp_path / "digits", *TRACKED, *writers(), resume=True).train()
    first, second = offline_runs(tmp_path / "digits")
    assert (first["project"], first["name"]) == ("demo", "digits")
    assert first["id"] == second["id"]
    assert (first["exit"], second["exit"]) == (1, 0)
    assert first["config"]["SOLVER"]["BASE_LR"] == 0.1
    rows = first["rows"] + second["rows"]
    assert [row["iteration"] for row in rows if "train/loss" in row] == [3, 7, 9]
    assert [row["iteration"] for row in rows if "eval/synthetic/accuracy" in row] == [4, 10]
    kinds = {value for row in rows for key, value in row.items() if key.endswith("/_type")}
    assert kinds == {"image-file", "html-file"}
    assert sys.modules["wandb"].run is None


def test_a_run_without_a_key_is_refused_before_it_writes_anything(tmp_path, monkeypatch):
    for name in ("wandb", "ipykernel"):  # a script that has imported wandb may have logged in, a notebook asks
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr("sys.stdin", None)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"WRITERS\[0\].* no API key"):
        config_trainer(tmp_path / "run", "LOG.WRITERS", ["WandbWriter"])
    assert list(tmp_path.iterdir()) == []
    assert "wandb" not in sys.modules
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    WandbWriter()
