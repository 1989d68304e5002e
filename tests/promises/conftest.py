import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import legitimate
import pytest
from refusing import make_folder

from hookline.config import global_cfg
from hookline.engine import default_argument_parser


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with configs, files of the user and finished runs. No test changes it."""
    folder = tmp_path_factory.mktemp("wrong_uses")
    make_folder(folder)
    return folder


@pytest.fixture
def args(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[argparse.Namespace]:
    """The parsed command line of a script that a person starts in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(legitimate, "MINE", {})
    Path("mine.yaml").write_text(legitimate.CONFIG)
    monkeypatch.setattr(sys, "argv", ["train_net.py", "--config-file", "mine.yaml", "SEED", "3"])
    yield default_argument_parser().parse_args()
    global_cfg.clear()
