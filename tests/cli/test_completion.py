"""``hookline completion``, in a real bash."""

import re
import shutil
import subprocess

import pytest

from hookline.cli import main


@pytest.mark.skipif(not shutil.which("bash"), reason="needs bash")
@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("tr", ["train"]),
        ("find-", ["find-lr", "find-batch-size"]),
        ("--num-g", ["--num-gpus"]),
        ("SOLVER.BASE_LR", ["SOLVER.BASE_LR", "SOLVER.BASE_LR_END"]),
        ("my", []),
    ],
)
def test_words_are_completed(capsys, typed, completed):
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    words = re.fullmatch(r'complete -o default -W "([^"$`]*)" hookline\n', script)[1]
    text = f'{script}\ncomplete -p hookline > /dev/null && compgen -W "{words}" -- "{typed}"'
    done = subprocess.run(["bash", "-c", text], capture_output=True, text=True, check=False)
    assert (done.stdout.split(), done.stderr) == (completed, "")


def test_zsh_uses_the_same_script(capsys):
    main(["completion", "bash"])
    bash = capsys.readouterr().out
    main(["completion", "zsh"])
    assert capsys.readouterr().out == "autoload -U +X bashcompinit && bashcompinit\n" + bash
