"""Machines of a network, as network namespaces."""

import contextlib
import os
import shutil
import subprocess

import pytest


def ip(*arguments):
    return subprocess.run(["ip", *map(str, arguments)], capture_output=True, text=True, check=True, timeout=30)


@pytest.fixture
def namespaces():
    """Names of three network namespaces with the addresses 10.213.7.1 to 10.213.7.3 on their device "net"."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need ip and root")
    names = [f"hookline-{os.getpid()}-{number}" for number in range(3)]
    made = []
    try:
        try:
            for name in names:
                ip("netns", "add", name)
                made.append(name)
            # All devices are created in a namespace, so that the system's own network does not change. The first
            # machine's "net" is the bridge between the cables to the others.
            ip("-n", names[0], "link", "add", "net", "type", "bridge")
            for number, name in enumerate(names[1:], start=1):
                ip("-n", names[0], "link", "add", f"port{number}", "type", "veth", "peer", "name", "net", "netns", name)
                ip("-n", names[0], "link", "set", f"port{number}", "master", "net", "up")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: {error.stderr}")
        for number, name in enumerate(names):
            ip("-n", name, "address", "add", f"10.213.7.{number + 1}/24", "dev", "net")
            ip("-n", name, "link", "set", "net", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in made:
            with contextlib.suppress(subprocess.CalledProcessError):
                ip("netns", "delete", name)
