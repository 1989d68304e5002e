"""The program that ``python -m hookline.detectron2`` runs.

A process that is started by the script, such as a rank, first imports the main module of its parent. It finds this
module by name. So the aliases of detectron2's modules are there before the script is imported.
"""

import os

VARIABLE = "HOOKLINE_SCRIPT"
"""The environment variable that tells new processes the path of the script."""


def run(path: str, namespace: dict[str, object]) -> None:
    """Run a script in the namespace of a module."""
    with open(path, "rb") as file:
        code = compile(file.read(), path, "exec")
    namespace.update(__file__=path, __package__=None, __doc__=None)
    exec(code, namespace)


if __name__ == "__mp_main__":
    run(os.environ[VARIABLE], globals())
