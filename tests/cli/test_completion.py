"""``hookline completion``, in a real bash."""

import shutil
import subprocess

import pytest

from hookline.cli import main

ASK = """
{script}
COMP_WORDS=({words}); COMP_CWORD={last}; _hookline; echo "${{COMPREPLY[@]}}"
"""


@pytest.mark.skipif(not shutil.which("bash"), reason="needs bash")
@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        (["tr"], "train"),
        (["find-"], "find-lr find-batch-size"),
        (["train", "--nu"], "--num-gpus --num-machines"),
        (["eval", "--resume", "SOLVER.BASE_LR"], "SOLVER.BASE_LR SOLVER.BASE_LR_END"),
        (["config", "ex"], "explain"),
        (["inspect", "SOLVER.BASE"], ""),
        (["new", "my"], ""),
    ],
)
def test_words_are_completed(capsys, typed, completed):
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    text = ASK.format(script=script, words=" ".join(["hookline", *typed]), last=len(typed))
    done = subprocess.run(["bash", "-c", text], capture_output=True, text=True, check=True)
    assert (done.stdout.strip(), done.stderr) == (completed, "")


def test_zsh_uses_the_same_script(capsys):
    main(["completion", "bash"])
    bash = capsys.readouterr().out
    main(["completion", "zsh"])
    assert capsys.readouterr().out == "autoload -U +X bashcompinit && bashcompinit\n" + bash
