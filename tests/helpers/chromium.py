"""Chromium for tests of pages, driven through a pipe: no package is needed, only a program.

It is the program that the environment variable HOOKLINE_CHROMIUM names, or the first one of PROGRAMS on the PATH.
"""

import base64
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "chrome", "headless_shell")
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars")


def find_chromium():
    """Return the path of the program, or None."""
    named = os.environ.get("HOOKLINE_CHROMIUM")
    return named or next(filter(None, map(shutil.which, PROGRAMS)), None)


class Browser:
    """A context with one page.

    Args:
        path: the HTML file, which is read without a network; or the address of a local server.
        width, height: size of the window in pixels.
        dark: whether the system prefers dark colors.
    """

    def __init__(self, path, width=1280, height=900, dark=False):
        self.path, self.size, self.dark = path, (width, height), dark
        self.errors = []  # what the page reported
        self.requests = []  # the addresses that the page loaded
        self._number, self._session, self._buffer, self._loaded = 0, None, b"", False

    def __enter__(self):
        self._folder = tempfile.mkdtemp()
        read_by_chromium, self._output = os.pipe()
        self._input, written_by_chromium = os.pipe()
        # Chromium reads from file descriptor 3 and writes to 4.
        command = f'exec "$@" 3<&{read_by_chromium} 4>&{written_by_chromium}'
        options = (f"--user-data-dir={self._folder}", "--remote-debugging-pipe", "about:blank")
        self._process = subprocess.Popen(
            ["bash", "-c", command, "bash", find_chromium(), *FLAGS, *options],
            pass_fds=(read_by_chromium, written_by_chromium),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(read_by_chromium)
        os.close(written_by_chromium)
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network"):
            self._call(f"{domain}.enable")
        width, height = self.size
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if self.dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])
        served = str(self.path).startswith("http://127.0.0.1:")
        self._call(
            "Network.emulateNetworkConditions",
            offline=not served,
            latency=0,
            downloadThroughput=-1,
            uploadThroughput=-1,
        )
        self._loaded = False
        self._call("Page.navigate", url=self.path if served else Path(self.path).resolve().as_uri())
        while not self._loaded:
            self._read()
        return self

    def __exit__(self, *error):
        self._process.kill()
        self._process.wait()
        os.close(self._input)
        os.close(self._output)
        shutil.rmtree(self._folder, ignore_errors=True)

    def run(self, script):
        """Return the value of a JavaScript expression, after the page was drawn again."""
        expression = f"new Promise((done) => {{ const value = (() => ({script}))(); requestAnimationFrame(() => "
        expression += "requestAnimationFrame(() => done(value))); })"
        found = self._call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def mouse(self, kind, x, y):
        """Send a mouse event: "Moved", "Pressed" or "Released"."""
        held = kind != "Released" and (kind == "Pressed" or self._held)
        self._call(
            "Input.dispatchMouseEvent",
            type=f"mouse{kind}",
            x=x,
            y=y,
            button="left" if kind != "Moved" or held else "none",
            buttons=int(held),
            clickCount=int(kind != "Moved"),
        )
        self._held = held

    _held = False

    def screenshot(self, path):
        """Write a PNG file of the window."""
        Path(path).write_bytes(base64.b64decode(self._call("Page.captureScreenshot")["data"]))

    def _call(self, method, **parameters):
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._output, json.dumps(message).encode() + b"\0")
        while (answer := self._read()).get("id") != self._number:
            pass
        assert "error" not in answer, answer["error"]
        return answer["result"]

    def _read(self):
        while b"\0" not in self._buffer:
            data = os.read(self._input, 1 << 16)
            assert data, "Chromium ended"
            self._buffer += data
        text, self._buffer = self._buffer.split(b"\0", 1)
        message = json.loads(text)
        method = message.get("method")
        if method == "Page.loadEventFired":
            self._loaded = True
        elif method == "Runtime.exceptionThrown":
            self.errors.append(message["params"]["exceptionDetails"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(message["params"]["request"]["url"])
        return message
