"""Lets the Python commands of a shell run in forked processes, which start faster: see ``forker.py``."""

import contextlib
import json
import os
import shlex
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from forker import forker

# Runs instead of Python: asks the process of the tests to fork, and ends as the forked process does.
_CLIENT = """#!{python} -ES
import json, os, socket, sys
words, environment = sys.argv[1:], dict(os.environ)
if words[:2] == ["-m", "hookline"]:
    words[:2] = [{command}]
    environment["PYTHONPATH"] = os.getcwd()
elif not words or not words[0].endswith(".py"):
    os.execv({python!r}, [{python!r}, *words])
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
server.sendall(json.dumps([words, os.getcwd(), environment, os.getpid()]).encode() + b"\\n")
code = int(server.makefile().readline())
sys.exit(code if code >= 0 else 128 - code)
"""


@contextlib.contextmanager
def forked_python(folder: Path) -> Iterator[str]:
    """Yield the word that a shell command has instead of Python: ``-m hookline`` and scripts are forked.

    Args:
        folder: where the program of that name is written.
    """
    address = f"\0hookline-tests-{os.getpid()}-{folder}"
    command = repr(str(Path(__file__).parent / "hookline_command.py"))
    client = folder / ".python"
    client.write_text(_CLIENT.format(python=sys.executable, command=command, address=address))
    client.chmod(0o755)

    def serve(connection: socket.socket) -> None:
        with connection, connection.makefile("rb") as orders:
            words, place, environment, pid = json.loads(orders.readline())
            process = forker.start(words, Path(place), environment, log=Path(f"/proc/{pid}/fd/1"))
            connection.sendall(b"%d\n" % process.wait())

    def accept() -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                threading.Thread(target=serve, args=(server.accept()[0],), daemon=True).start()

    with socket.socket(socket.AF_UNIX) as server:
        server.bind(address)
        server.listen()
        threading.Thread(target=accept, daemon=True).start()
        yield shlex.quote(str(client))
        server.shutdown(socket.SHUT_RDWR)
