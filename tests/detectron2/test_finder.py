"""Code that imports detectron2, as it runs where only hookline is installed."""

import subprocess
import sys
import textwrap

import pytest
from snippets import run_python

import hookline.detectron2
import hookline.engine
import hookline.hooks
from hookline.engine import comm


def test_modules_and_names_are_found_by_every_form_of_import():
    import detectron2.utils.comm
    import detectron2.utils.comm as same
    from detectron2.config import CfgNode
    from detectron2.engine import DefaultTrainer, hooks
    from detectron2.utils import comm as third
    from detectron2.utils.events import get_event_storage

    assert DefaultTrainer is hookline.engine.DefaultTrainer
    assert get_event_storage is hookline.hooks.get_event_storage
    assert CfgNode is hookline.config.CfgNode
    assert hooks.EvalHook is hookline.hooks.EvalHook
    assert detectron2.utils.comm is same is third
    assert same.get_rank is comm.get_rank
    names = {}
    exec("from detectron2.engine.hooks import *", names)
    assert names["EvalHook"] is hookline.hooks.EvalHook
    assert "launch" not in names


def test_submodules_need_no_import_and_what_is_set_in_one_is_set_in_hookline(monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "detectron2"]:
        monkeypatch.delitem(sys.modules, name)
    import detectron2

    assert not hasattr(detectron2, "structures")
    monkeypatch.setattr(comm, "get_world_size", comm.get_world_size)
    detectron2.utils.comm.get_world_size = lambda: 7
    assert comm.get_world_size() == detectron2.utils.comm.get_world_size() == 7


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("from detectron2.structures import Boxes", r"detectron2\.structures .*it is part of detection"),
        ("from detectron2 import model_zoo", r"detectron2\.model_zoo .*it is part of detection"),
        ("from detectron2.evaluation import COCOEvaluator", "COCOEvaluator .*it is part of"),
        ("from detectron2.engine import DefaultTrainr", "DefaultTrainr is not in hookline; did you mean"),
        ("import detectron2.utils.event", "event is not in hookline; did you mean 'events'"),
    ],
)
def test_a_name_that_is_not_here_is_an_import_error_that_says_why(statement, message):
    import detectron2.engine

    with pytest.raises(ImportError, match=message):
        exec(statement)
    assert not hasattr(detectron2.engine, "create_nothing")


SCRIPT = """
import sys

from detectron2.engine import launch
from detectron2.utils import comm
from neighbour import GREETING


def main(word):
    print(f"{GREETING} {word} from rank {comm.get_rank()} of {comm.get_world_size()}\\n", end="", flush=True)
    return comm.get_rank()


if __name__ == "__main__":
    print(sys.argv[1:], launch(main, int(sys.argv[1]), dist_url="auto", args=("there",), device="cpu"))
"""


@pytest.fixture
def script(tmp_path):
    (tmp_path / "project").mkdir()
    (tmp_path / "project/neighbour.py").write_text("GREETING = 'hello'\n")
    (tmp_path / "project/train_net.py").write_text(SCRIPT)
    return "project/train_net.py"


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_script_and_its_ranks_run_unchanged(script, tmp_path, ranks):
    (tmp_path / "project/detectron2").mkdir()  # only a folder of that name, such as a clone
    done = run_python(["-m", "hookline.detectron2", script, str(ranks)], tmp_path)
    assert done.returncode == 0, done.stderr
    expected = [f"hello there from rank {rank} of {ranks}" for rank in range(ranks)]
    assert sorted(done.stdout.splitlines()) == [f"['{ranks}'] 0", *expected]


def test_a_script_that_is_not_there_is_bad_input(tmp_path):
    done = run_python(["-m", "hookline.detectron2", "train.py"], tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: train.py: ")


def test_detectron2_itself_is_not_hidden(script, tmp_path):
    (tmp_path / "project/detectron2").mkdir()
    (tmp_path / "project/detectron2/__init__.py").write_text("")
    done = run_python(["-m", "hookline.detectron2", script, "1"], tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("error: detectron2 itself would be imported, from ")
    code = textwrap.dedent("""
        import sys
        sys.path.insert(0, "project")
        import hookline.detectron2, detectron2
        print(detectron2.__file__.endswith("__init__.py"))
    """)
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout == "True\n", done.stderr
    assert "detectron2 is installed" in done.stderr
