"""tools/port_imports.py on small projects."""

import runpy
import sys
from pathlib import Path

import pytest

from hookline.detectron2.finder import describe

TOOL = Path(__file__).parents[2] / "tools" / "port_imports.py"


@pytest.fixture
def tool(tmp_path, monkeypatch, capsys):
    """Run the tool in a folder; returns its exit code, output and errors."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", [str(TOOL), *arguments])
        with pytest.raises(SystemExit) as end:
            runpy.run_path(str(TOOL), run_name="__main__")
        return end.value.code, *capsys.readouterr()

    return run


def ported(tool, text):
    """What a file becomes."""
    Path("train_net.py").write_bytes(text.encode())
    assert tool("train_net.py", "--write")[0] == 0
    once = Path("train_net.py").read_bytes()
    assert tool("train_net.py", "--write")[1] == "0 imports in 0 files changed; 0 places need a hand\n"
    assert Path("train_net.py").read_bytes() == once
    return once.decode()


PROJECT = '''\
"""Trains with detectron2."""
import os, detectron2.utils.comm as comm  # ranks
from detectron2.config import get_cfg, CfgNode as CN
from detectron2.engine import (  # the engine
    DefaultTrainer,  # subclassed below
    hooks,
)
from detectron2.utils import comm as ranks, events


def main():
    from detectron2.utils.events import get_event_storage; storage = get_event_storage()
    logging.getLogger("detectron2.main").info("é: %s %s", hooks.EvalHook, events.EventStorage)
'''

PORTED = '''\
"""Trains with detectron2."""
import os, hookline.engine.comm as comm  # ranks
from hookline.config import get_cfg, CfgNode as CN
from hookline.engine import (  # the engine
    DefaultTrainer,  # subclassed below
    hooks,
)
from hookline.engine import comm as ranks
from hookline import hooks as events


def main():
    from hookline.hooks import get_event_storage; storage = get_event_storage()
    logging.getLogger("detectron2.main").info("é: %s %s", hooks.EvalHook, events.EventStorage)
'''


def test_only_imports_change(tool):
    assert ported(tool, PROJECT) == PORTED


def test_line_endings_stay(tool):
    assert ported(tool, PROJECT.replace("\n", "\r\n")) == PORTED.replace("\n", "\r\n")


def test_without_write_the_changes_are_shown_and_nothing_is_written(tool, tmp_path):
    (tmp_path / "project/tools").mkdir(parents=True)
    (tmp_path / "project/tools/train.py").write_text("from detectron2.engine import launch\n")
    (tmp_path / "project/other.py").write_text("import torch\n")
    code, out, err = tool("project")
    assert (code, err) == (0, "")
    assert "--- project/tools/train.py\n" in out
    assert "\n-from detectron2.engine import launch\n+from hookline.engine import launch\n" in out
    assert out.endswith("1 imports in 1 files to change (--write applies this); 0 places need a hand\n")
    assert (tmp_path / "project/tools/train.py").read_text() == "from detectron2.engine import launch\n"


def test_names_of_several_modules_are_split_if_no_comment_would_be_lost(tool):
    Path("a.py").write_text(
        "try:\n"
        "    from detectron2.evaluation import (\n"
        "        COCOEvaluator,\n"
        "        verify_results,\n"
        "    )\n"
        "    from detectron2.evaluation import (\n"
        "        COCOEvaluator,  # AP\n"
        "        verify_results,\n"
        "    )\n"
        "except ImportError: from detectron2.evaluation import LVISEvaluator, verify_results\n"
    )
    code, out, _ = tool("a.py", "--write")
    assert code == 1
    assert Path("a.py").read_text() == (
        "try:\n"
        "    from detectron2.evaluation import COCOEvaluator\n"
        "    from hookline.engine.evaluation import verify_results\n"
        "    from detectron2.evaluation import (\n"
        "        COCOEvaluator,  # AP\n"
        "        verify_results,\n"
        "    )\n"
        "except ImportError: "
        "from detectron2.evaluation import LVISEvaluator; from hookline.engine.evaluation import verify_results\n"
    )
    assert "  a.py:3: detectron2.evaluation.COCOEvaluator is not in hookline: hookline has no evaluators" in out
    assert "  a.py:6: the comments stay where they are, so write this by hand: from detectron2.evaluation import" in out
    assert "  a.py:10: detectron2.evaluation.LVISEvaluator is not in hookline" in out


def test_what_needs_a_hand_is_named_with_its_line(tool):
    Path("a.py").write_text(
        "import detectron2.utils.comm\n"
        "from detectron2.structures import Boxes\n"
        "from detectron2.engine import hooks\n"
        "detectron2.utils.comm.get_rank(hooks.NoHook)\n"
        "mock.patch('detectron2.engine.launch')\n"
    )
    Path("b.py").write_text("print 'detectron2'\n")
    code, out, _ = tool(".")
    assert code == 1
    assert out.split("By hand:\n")[1].splitlines()[:-1] == [
        "  a.py:1: import detectron2.utils.comm: 'detectron2' is used in lines 4",
        f"  a.py:2: {describe('detectron2.structures')}",
        "  a.py:4: detectron2.engine.hooks.NoHook is not in hookline (see docs/porting/detectron2.md)",
        "  a.py:5: the string 'detectron2.engine.launch' names a module of detectron2",
        "  b.py:1: cannot be read or written: Missing parentheses in call to 'print'. Did you mean print(...)?",
    ]


def test_a_path_that_is_not_there_is_bad_input(tool):
    assert tool("nothing") == (2, "", "error: nothing: there is no such file or folder\n")
