"""What hookline guarantees, one file per promise. Read the names of the tests.

- ``test_exact_resume.py``: a killed and resumed run equals an uninterrupted one; each item of a checkpoint is needed.
- ``test_kill_sweep.py``: so does a run that is killed again and again, at random moments.
- ``test_fault_sweep.py``: so does one after a fault of the disk or a kill at any of its file operations.
- ``test_ranks_equal_one.py``: several processes train as one does.
- ``test_exit_codes.py``: signals, failures and time limits end a run soon, with their exit codes, and nothing is lost.
- ``test_wrong_configs.py``, ``test_wrong_commands.py``, ``test_wrong_arguments.py``: a mistake is refused in a message
  that names key, place and cure, and nothing changes on disk.
- ``test_every_key.py``: an unusual value of any config key works or is refused.
- ``test_legitimate_scripts.py``, ``test_legitimate_models.py``: what people write trains as it is.
- ``test_legitimate_files.py``: so it does in a folder with files of theirs, and none of these is harmed.
- ``test_readme.py``: commands, snippets and links of README and docs work.
"""

from pathlib import Path


def test_every_promise_is_in_the_list_above():
    files = {path.name for path in Path(__file__).parent.glob("test_*.py")} - {Path(__file__).name}
    assert files == {name for name in __doc__.split("``") if name.startswith("test_")}
