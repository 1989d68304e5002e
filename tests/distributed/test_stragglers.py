"""The log names a rank that is slower than the others, and the part of the step."""

import re
import socket

import pytest
from ranks import run_ranks


@pytest.fixture(scope="module")
def lines(tmp_path_factory):
    code, output, results = run_ranks("stragglers:main", 2, tmp_path_factory.mktemp("ranks"))
    assert code == 0, output
    assert results[1] == {"data": [], "forward": [], "hook": []}
    return results[0]


def assert_named(line, part):
    found = re.fullmatch(
        r"Rank 1 \(host (\S+)\) is a straggler at iteration \d+: its (.+) takes? (\S+) s a step, the others' (\S+) s; "
        r"a step takes (\S+) s",
        line,
    )
    assert found, line
    assert found[1] == socket.gethostname()
    assert found[2] == part
    assert 0.035 < float(found[3]) <= float(found[5])


@pytest.mark.parametrize(("slow", "part"), [("data", "data loading"), ("hook", "hooks (mostly SlowHook)")])
def test_a_straggler_is_named(lines, slow, part):
    assert_named(lines[slow][0], part)


def test_a_straggler_in_the_forward_pass_is_named_until_it_is_as_fast_as_the_others(lines):
    named, gone, *_ = lines["forward"]
    assert_named(named, "forward pass")
    assert re.fullmatch(r"No straggler any more, at iteration \d+", gone)
