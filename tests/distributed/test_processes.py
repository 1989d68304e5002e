"""Ranks of ``launch()``: what they know of each other, and how they end together."""

from pathlib import Path

import pytest
from ranks import SYNTHETIC, run_ranks

pytestmark = pytest.mark.timeout(400)

COLLECTIVES = """
def late(seconds):
    time.sleep(seconds)
    return time.monotonic()

def main(folder):
    rank = comm.get_rank()
    results = {
        "ranks": [rank, comm.get_world_size(), comm.get_local_rank(), comm.get_local_size()],
        "environment": [os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["LOCAL_RANK"]],
        "broadcast": comm.broadcast_object({"from": rank}, src=1),
        "sum": comm.all_reduce_sum(rank + 1),
        "sum of floats": comm.all_reduce_sum(rank + 0.5),
        "sum of tensors": comm.all_reduce_sum(torch.tensor([1.5 + rank])).tolist(),
    }
    with comm.main_process_first():
        cache = folder / "cache"
        results["found the cache"] = cache.exists()
        if rank == 0:
            time.sleep(0.3)
            cache.write_text("expensive")
    with comm.main_process_first(local=False):  # the same place again, by another way
        pass
    group = comm.get_local_process_group()
    total = torch.ones(1)
    torch.distributed.all_reduce(total, group=group)
    results["ranks of this machine"] = total.item()
    comm.create_local_process_group(1)
    results["a group a rank"] = torch.distributed.get_world_size(comm._local_group(torch.distributed.group.WORLD, 1))
    for _ in range(3):
        comm.barrier("a", timeout=20)
    if rank == 0:
        try:
            comm.barrier("the evaluation", timeout=0.5)
        except TimeoutError as error:
            results["missing"] = str(error)
    comm.synchronize()
    (folder / f"{rank}.json").write_text(json.dumps(results))
"""


def test_ranks_know_each_other_and_exchange_objects_and_numbers(tmp_path):
    code, output, (first, second) = run_ranks(COLLECTIVES, 2, tmp_path)
    assert code == 0, output
    assert (first["ranks"], second["ranks"]) == ([0, 2, 0, 2], [1, 2, 1, 2])
    assert (first["environment"], second["environment"]) == (["0", "2", "0"], ["1", "2", "1"])
    for result in (first, second):
        assert result["broadcast"] == {"from": 1}
        assert (result["sum"], result["sum of floats"], result["sum of tensors"]) == (3, 2.0, [4.0])
        assert (result["ranks of this machine"], result["a group a rank"]) == (2.0, 1)
    assert (first["found the cache"], second["found the cache"]) == (False, True)
    assert first["missing"] == "barrier 'the evaluation': rank(s) 1 did not come within 0.5 s (rank 0 waited)"


ENDS = """
from hookline.engine import rank as ranks
ranks._GRACE = 1.0  # instead of 4 seconds

def main(folder):
    rank, how = comm.get_rank(), (folder / "how").read_text()
    (folder / f"{rank}.json").write_text(str(os.getpid()))
    comm.synchronize()
    if rank == 1:
        if how == "raises": raise ValueError("the reason")
        if how == "refuses": raise ConfigError("SOME.KEY: is wrong")
        if how == "is killed": os.kill(os.getpid(), signal.SIGKILL)
        if how == "is late": time.sleep(2)
    if how == "stops": raise SystemExit(75)
    if how == "is late": return
    print(f"{time.time()} waits", flush=True)
    time.sleep(60) if how != "is killed" else comm.synchronize()
"""


def end(how, folder):
    folder.mkdir(exist_ok=True)
    (folder / "how").write_text(how)
    return run_ranks(ENDS, 2, folder)


def assert_gone(pids):
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def test_an_exception_on_one_rank_ends_the_other_which_says_where_it_stood(tmp_path):
    code, output, pids = end("raises", tmp_path)
    assert code == 1
    # The other one sleeps, and notices nothing by itself.
    assert "rank 0 is ended, since rank 1 failed and it did not end by itself; its threads stand here:" in output
    assert 'script.py", line' in output.partition("its threads stand here:")[2]
    assert output.count("ValueError: the reason") == 2  # where it was raised, and last of all
    assert output.rstrip().endswith("ValueError: the reason")
    assert_gone(pids)


def test_a_rank_that_is_killed_ends_the_others_and_is_named(tmp_path):
    code, output, pids = end("is killed", tmp_path)
    assert code == 1
    last = output.rstrip().splitlines()[-1]
    assert last.endswith(f"rank 1 of 2 failed first: process {pids[1]} was killed by SIGKILL")
    assert_gone(pids)


def test_bad_input_found_by_one_rank_is_one_error_of_the_launcher(tmp_path):
    code, output, pids = end("refuses", tmp_path)
    assert code == 1  # of a script that does not catch it
    assert output.rstrip().endswith("ConfigError: SOME.KEY: is wrong")
    assert output.count("SOME.KEY: is wrong") == 1
    assert_gone(pids)


def test_an_exit_code_that_all_ranks_end_with_is_the_launchers(tmp_path):
    code, output, _ = end("stops", tmp_path)
    assert (code, output) == (75, "")


def test_a_rank_that_is_done_waits_for_those_that_are_not(tmp_path):
    code, output, pids = end("is late", tmp_path)
    assert (code, output) == (0, "")
    assert_gone(pids)


TIMEOUTS = """
from hookline.engine.checkpoint.sharded_checkpointer import ShardedCheckpointer
TIMEOUT = 7

def main(folder):
    checkpointer = ShardedCheckpointer(nn.Linear(1, 1), str(folder))
    groups = [torch.distributed.group.WORLD, comm.object_group(), comm.get_local_process_group(), checkpointer._group]
    cpu = torch.device("cpu")
    limits = [group._get_backend(cpu).options._timeout.total_seconds() for group in groups]
    (folder / f"{comm.get_rank()}.json").write_text(json.dumps([*limits, comm.timeout().total_seconds()]))
"""


def test_every_group_and_barrier_has_the_timeout_of_the_run(tmp_path):
    code, output, limits = run_ranks(TIMEOUTS, 2, tmp_path)
    assert code == 0, output
    assert limits == [[7.0] * 5] * 2


OTHER_TIMEOUT = """
from hookline.engine import default_setup

def main(folder):
    cfg = get_cfg()
    cfg.merge_from_file(%r)
    cfg.merge_from_list(["MODEL.DEVICE", "cpu", "OUTPUT_DIR", str(folder / "run"), "PARALLEL.TIMEOUT", "20s"])
    default_setup(cfg)
"""


def test_a_timeout_of_the_config_that_the_script_does_not_pass_to_launch_is_warned_of(tmp_path):
    code, output, _ = run_ranks(OTHER_TIMEOUT % str(SYNTHETIC), 2, tmp_path)
    assert code == 0, output
    assert "PARALLEL.TIMEOUT is 20 s, but the ranks were launched with 60 s: pass timeout= to launch()" in output


HANGS = """
from hookline.engine import rank as ranks
ranks._GRACE = 0.2  # instead of 4 seconds
TIMEOUT = 2

def hang():
    time.sleep(60)

def main(folder):
    comm.synchronize()
    (folder / f"{comm.get_rank()}.json").write_text(str(os.getpid()))
    if comm.get_rank() == 1:
        hang()
    how = (folder / "how").read_text()
    comm.barrier("here") if how == "barrier" else comm.all_gather("objects")
"""


@pytest.mark.parametrize("how", ["objects", "barrier"])
def test_a_rank_that_hangs_is_found_within_the_timeout_and_shown_where_it_stands(how, tmp_path):
    (tmp_path / "how").write_text(how)
    code, output, pids = run_ranks(HANGS, 3, tmp_path, timeout=20)
    assert code == 1
    last = output.rpartition("Rank 1 hung first:")[2]
    stands, _, waits = last.partition("waited for it here:")
    assert "others waited 2 s for it" in stands
    assert "in hang" in stands
    assert "in main" in waits
    assert "in hang" not in waits
    assert_gone(pids)


BLOCKS = """
from hookline.engine import rank as ranks
sys.modules["hookline.engine.launch"]._GRACE = 1.0  # instead of 8 seconds
ranks._ANSWER = 1
TIMEOUT = 2

def search():
    import re
    re.search("(a+)+b", "a" * 60)  # for years, and no other thread runs meanwhile

def main(folder):
    comm.synchronize()
    (folder / f"{comm.get_rank()}.json").write_text(str(os.getpid()))
    if comm.get_rank() == 1:
        search()
    comm.synchronize()
"""


def test_a_rank_whose_interpreter_is_blocked_is_shown_where_it_stands(tmp_path):
    code, output, pids = run_ranks(BLOCKS, 2, tmp_path, timeout=20)
    assert code == 1
    stands = output.partition("rank 1 is killed, since its interpreter is blocked; it stands here:")[2]
    assert "in search" in stands
    assert "rank 1 of 2 left first: it does not answer: its process ended or is blocked" in output
    assert_gone(pids)


ABORTS = """
from hookline.engine import rank as ranks
ranks._GRACE = 1

def hang():
    time.sleep(60)

def main(folder):
    comm.synchronize()
    if comm.get_rank() == 1:
        hang()
    os.abort()
"""


def test_where_a_rank_hangs_is_shown_when_nccl_aborts_another_one(tmp_path):
    code, output, _ = run_ranks(ABORTS, 2, tmp_path, timeout=20)
    assert code == 1
    last = output.rpartition("rank 0 of 2 failed first: process ")[2]
    assert "was killed by SIGABRT\nRank 1 worked on here:" in last
    assert "in hang" in last


LEAVES = """
from hookline.engine import rank as ranks
ranks._GRACE, ranks._LEAVE, ranks._ANSWER = 0.5, 0.5, 1

def main(folder):
    rank, how = comm.get_rank(), (folder / "how").read_text()
    (folder / f"{rank}.json").write_text(str(os.getpid()))
    comm.synchronize()
    if rank == 1:
        if how == "os._exit(3)": os._exit(3)
        if how == "os._exit(0)": os._exit(0)
        if how == "sys.exit(3)": sys.exit(3)
        if how == "sys.exit(0)": sys.exit(0)
        if how == "sys.exit(75)": sys.exit(75)
        if how == "return": return
    comm.synchronize()
"""


@pytest.mark.parametrize("how", ["os._exit(3)", "os._exit(0)", "sys.exit(3)", "sys.exit(0)", "sys.exit(75)", "return"])
def test_a_rank_that_leaves_before_the_others_is_named_with_its_exit_code(how, tmp_path):
    (tmp_path / "how").write_text(how)
    code, output, pids = run_ranks(LEAVES, 2, tmp_path, timeout=20)  # not by the ranks' timeout, which is 60 s
    assert code == 1
    last = output.rpartition("rank 1 of 2 left first: ")[2]
    number = "".join(filter(str.isdigit, how)) or "0"
    assert f"exit code was {number}" in last
    if how.startswith("sys"):
        assert "in main" in last
        assert how in last
    assert_gone(pids)


LOGGED = """
from hookline.engine.setup.logger import setup_logger
from hookline.engine.ranks.process import tell_log_file

def main(folder):
    setup_logger(str(folder), comm.get_rank())
    tell_log_file(str(folder / "log.txt"))
    comm.synchronize()
    if comm.get_rank() == 1:
        os._exit(3)
    comm.synchronize()
"""


def test_the_first_failure_stands_last_in_the_log_file(tmp_path):
    code, _, _ = run_ranks(LOGGED, 2, tmp_path)
    assert code == 1
    assert "Rank 1 left first:\nprocess " in (tmp_path / "log.txt").read_text().rpartition("[")[2]


WORKS_ON = """
from hookline.engine import rank as ranks
ranks._LEAVE = 0.1

def main(folder):
    (folder / f"{comm.get_rank()}.json").write_text(str(os.getpid()))
    comm.synchronize()
    if comm.get_rank() == 1:
        sys.exit(0)
    while Path("/proc", (folder / "1.json").read_text()).exists():
        time.sleep(0.01)
"""


def test_a_rank_may_work_on_alone_after_the_others_have_left(tmp_path):
    code, output, _ = run_ranks(WORKS_ON, 2, tmp_path, timeout=20)
    assert (code, output) == (0, "")


LEFT_BEHIND = """
def main(folder):
    child = os.fork()
    if not child:
        time.sleep(100)
        os._exit(0)
    (folder / f"{comm.get_rank()}.json").write_text(json.dumps(child))
    comm.synchronize()
    if comm.get_rank() == 1:
        raise ValueError("the reason")
    time.sleep(100)
"""


def test_what_ranks_that_failed_have_started_ends_with_them(tmp_path):
    code, output, children = run_ranks(LEFT_BEHIND, 2, tmp_path, timeout=60)
    assert code == 1
    assert "ValueError: the reason" in output
    for child in children:
        stat = Path(f"/proc/{child}/stat")
        assert not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"
