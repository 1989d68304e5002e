"""Runs scripts in processes forked from one that has imported their modules.

A new interpreter takes seconds to import ``hookline.engine``; a fork takes milliseconds. The script is ``__main__`` of
its own process, and ``launch()`` forks the ranks instead of starting new interpreters. Tests of how processes start do
not use this.

The processes are not forked from that of the tests, which has threads that a fork would lose.
"""

import atexit
import contextlib
import json
import multiprocessing
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import types
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

# ---------------------------------------------------------------------- in the tests' process


class Forked:
    """A process with a part of the interface of ``subprocess.Popen``. ``pid`` is also the number of its session."""

    def __init__(self, channel: socket.socket, out: IO[bytes], err: IO[bytes] | None) -> None:
        self._channel, self._out, self._err = channel, out, err
        self.returncode: int | None = None
        self.pid = self._answer()

    def poll(self) -> int | None:
        """Return the exit code, or None while it runs."""
        return self.returncode if not self.ended_within(0) else self.wait()

    def ended_within(self, seconds: float) -> bool:
        """Wait for the end; return whether it came in time."""
        return self.returncode is not None or bool(select.select([self._channel], [], [], max(0, seconds))[0])

    def wait(self, timeout: float | None = None) -> int:
        """Wait and return the exit code; raise ``subprocess.TimeoutExpired`` after the timeout."""
        if timeout is not None and not self.ended_within(timeout):
            raise subprocess.TimeoutExpired(str(self.pid), timeout)
        if self.returncode is None:
            self.returncode = self._answer()
            self._channel.close()
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str | None]:
        """Wait for the end; return standard output and, with ``apart``, standard error."""
        self.wait(timeout)
        return _text(self._out), self._err and _text(self._err)

    def send_signal(self, number: int) -> None:
        """Send a signal to the process alone."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def alive(self) -> list[int]:
        """Return the numbers of those of the process and all that it started that have not ended."""
        return _session(self.pid)

    def kill(self) -> None:
        """Kill the process and all that it started, and wait for its end."""
        while self.poll() is None or self.alive():
            for pid in self.alive():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)

    def _answer(self) -> int:
        line = b""
        while not line.endswith(b"\n"):
            part = self._channel.recv(1)
            if not part:
                raise RuntimeError("the process that forks the others has failed; what it said is above")
            line += part
        return int(line)


def _text(file: IO[bytes]) -> str:
    # Not read(), which moves the position of processes that still write.
    return os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0).decode()


def _session(number: int) -> list[int]:
    """Return the processes of a session that are still alive."""
    members = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            state, _, _, session = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
            if int(session) == number and state != "Z":
                members.append(int(folder.name))
    return members


class Forker:
    """Starts processes. The process that forks is started with the first one, and ends with this process."""

    def __init__(self) -> None:
        self._orders: socket.socket | None = None

    def start(
        self,
        command: Sequence[Any],
        folder: Path,
        environment: Mapping[str, str],
        *,
        log: Path | None = None,
        apart: bool = False,
    ) -> Forked:
        """Run a script in a folder.

        Args:
            command: its file and its arguments.
            log: a file to append the outputs to; by default ``communicate()`` returns them.
            apart: whether standard error is separate from standard output.
        """
        if self._orders is None:
            self._orders = self._serve()
        # The returned process closes both.
        out = tempfile.TemporaryFile() if log is None else log.open("ab")  # noqa: SIM115
        err = tempfile.TemporaryFile() if apart else None  # noqa: SIM115
        ours, theirs = socket.socketpair()
        with theirs:
            files = [theirs.fileno(), out.fileno(), (err or out).fileno()]
            socket.send_fds(self._orders, [b"."], files)
        order = [[str(part) for part in command], str(folder), dict(environment)]
        ours.sendall(json.dumps(order).encode() + b"\n")
        return Forked(ours, out, err)

    def _serve(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        # Without PYTHONPATH, which each order sets; in a session that Ctrl-C of a terminal does not reach.
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        process = subprocess.Popen(
            [sys.executable, "-P", __file__, str(theirs.fileno())],
            env={**environment, "OMP_NUM_THREADS": "1"},  # OpenMP's threads would not survive a fork
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        theirs.close()

        def close() -> None:
            ours.shutdown(socket.SHUT_RDWR)  # close() would not end it while a forked process has a copy
            process.wait()

        atexit.register(close)
        return ours


forker = Forker()

# ---------------------------------------------------------------------- in the process that forks


def serve(orders: socket.socket) -> tuple[str, str] | None:
    """Fork a process for each order. Returns in each the script's file and text; None at the end of orders."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # do not wait for the keepers
    while True:
        message, files, _, _ = socket.recv_fds(orders, 1, 3)
        if not message:
            return None
        if not os.fork():
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            orders.close()
            return keep(socket.socket(fileno=files[0]), *files[1:])
        for file in files:
            os.close(file)


def keep(channel: socket.socket, out: int, err: int) -> tuple[str, str] | None:
    """Fork the process that runs the script; report its number and its exit code."""
    with channel.makefile("rb") as lines:
        command, folder, environment = json.loads(lines.readline())
    pid = os.fork()
    if not pid:
        channel.close()
        prepare(command, folder, environment, out, err)
        return command[0], Path(command[0]).read_text()
    os.close(out)
    os.close(err)
    channel.sendall(b"%d\n" % pid)
    channel.sendall(b"%d\n" % os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    os._exit(0)


def prepare(command: list[str], folder: str, environment: dict[str, str], out: int, err: int) -> None:
    """Make this process look as if a shell had just started it for the command."""
    import numpy as np

    os.setsid()
    with open(os.devnull) as nothing:
        for file, number in ((nothing.fileno(), 0), (out, 1), (err, 2)):
            os.dup2(file, number)
    os.close(out)
    os.close(err)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = command
    paths = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[:0] = [os.path.dirname(os.path.abspath(command[0])), *paths]
    np.random.seed()  # Python seeds its own generator in each fork
    sys.modules["__main__"] = types.ModuleType("__main__")
    sys.modules["__main__"].__file__ = command[0]
    fork_ranks()


def fork_ranks() -> None:
    """Make ``launch()`` fork its ranks."""
    import torch

    from hookline.engine.parallel import processes

    start, child = processes._start, processes._child
    # A fork while the store's thread accepts a connection would copy a lock that is held. So no rank connects before
    # all ranks are forked.
    forked = multiprocessing.get_context("fork").Event()

    def start_all(ranks: Iterable[multiprocessing.Process]) -> None:
        start(ranks)
        forked.set()

    def forked_child(*args: Any) -> None:
        torch.set_num_threads(1)  # OpenMP's threads do not survive a fork
        forked.wait()
        for number in processes._SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:  # a fork has the launcher's handlers
                signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        child(*args)

    processes._METHOD, processes._start, processes._child = "fork", start_all, forked_child


def run(file: str, text: str) -> None:
    """Run the script, and exit as the interpreter does: wait for threads, call exit functions."""
    code = 0
    try:
        exec(compile(text, file, "exec"), vars(sys.modules["__main__"]))
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
    except BaseException as error:
        sys.excepthook(*sys.exc_info())
        code = 130 if isinstance(error, KeyboardInterrupt) else 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # the interpreter would free every object, which takes half a second


def warm_up() -> None:
    """Import the modules of scripts, and those that torch imports lazily."""
    import gc

    import sklearn.datasets  # noqa: F401
    import torch._dynamo
    import torch.distributed.checkpoint
    import torch.distributed.fsdp
    import torch.distributed.tensor
    import torch.utils.flop_counter
    import torch.utils.tensorboard.summary  # noqa: F401
    import torchmetrics  # noqa: F401
    from PIL import Image
    from tensorboard.plugins.hparams import api_pb2  # noqa: F401

    import hookline.engine.program.run
    import hookline.hooks

    Image.preinit()
    for name in hookline.hooks.__all__:
        getattr(hookline.hooks, name)
    gc.freeze()  # the collector then writes to no page that processes share


if __name__ == "__main__":
    warm_up()
    script = serve(socket.socket(fileno=int(sys.argv[1])))
    if script is not None:
        run(*script)
