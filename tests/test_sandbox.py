"""The walls of each sandbox, what becomes of its processes, files and ports, and of the run when there is no sandbox.
Ids such as g03.1 number checked cases."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

import grpo_toolbox
from grpo_toolbox.errors import ConfigError
from grpo_toolbox.rewards.code import canary
from grpo_toolbox.rewards.code.box import descendants, resident_bytes
from grpo_toolbox.rewards.code.canary import TRIALS, look_for_holes, open_pool
from grpo_toolbox.rewards.code.judge import judge
from grpo_toolbox.rewards.code.pool import Pool
from grpo_toolbox.rewards.code.problems import read_problem
from grpo_toolbox.rewards.code.records import Limits, SandboxError
from grpo_toolbox.rewards.code.sandbox import Process, may_become_others, view
from sandboxes import KINDS, sandboxes, verdict

DOUBLE = "def double(n):\n    return 2 * n"
TESTS = "assert double(4) == 8"
ROOT = Path(grpo_toolbox.__file__).parents[1]

kinds = pytest.mark.parametrize("kind", KINDS)


def value(pool: Pool, body: str) -> str:
    """What a function with this body returns in the sandbox, as the judge's reason tells it."""
    code = "def f():\n" + "\n".join(f"    {line}" for line in body.splitlines())
    found = verdict(pool, code, [{"call": "f", "expected": "nothing of that kind"}])
    return found.reason


# ---- walls


@kinds
def test_no_wall_has_a_hole(kind: str) -> None:
    assert "f(...) is []" in value(sandboxes(kind), "processes = 16\n" + _body(look_for_holes))


def _body(function: object) -> str:
    import inspect
    import textwrap

    return textwrap.dedent(inspect.getsource(function).partition('"""\n')[2])  # type: ignore[arg-type]


def test_outside_of_a_sandbox_the_same_look_finds_holes() -> None:
    """So that a sandbox without holes says something."""
    with contextlib.ExitStack() as stack:
        reading, writing = os.pipe()
        os.write(writing, b"x")
        kept = os.dup(0)
        os.dup2(reading, 0)
        stack.callback(os.dup2, kept, 0)
        found = look_for_holes(processes=3)
    assert "read standard input" in found
    assert "start more than 3 processes" in found
    assert any(hole.startswith("see ") for hole in found)


@kinds
@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("open('/proc/1/environ').read()", "Permission"),
        ("import socket\nsocket.create_connection(('1.1.1.1', 53), 1)", "Network is unreachable"),
        ("import socket\nsocket.getaddrinfo('example.org', 80)", "gaierror"),
        ("import os\nos.setuid(0)", "Operation not permitted|Invalid argument"),
        ("import ctypes\nlibc = ctypes.CDLL(None)\nreturn libc.unshare(0x10000000)", "is -1"),
        ("import ctypes\nlibc = ctypes.CDLL(None)\nreturn libc.mount(b'x', b'/tmp', b'tmpfs', 0, None)", "is -1"),
        ("import ctypes\nlibc = ctypes.CDLL(None)\nreturn libc.ptrace(0, 0, 0, 0)", "is -1"),
        ("import os\nos.memfd_create('x')", "Operation not permitted"),
        ("import os\nos.mkdir('/dev/x')", "Read-only"),
        ("import os\nreturn sorted(os.environ)", r"\['HOME', 'LANG'"),
        (
            "return [l.split()[1] for l in open('/proc/self/status') if l.startswith(('CapEff', 'CapPrm'))]",
            "'0{16}', '0{16}'",
        ),
        (
            "return [l.split()[1] for l in open('/proc/self/status') if l.startswith(('NoNewPrivs', 'Seccomp:'))]",
            "'1', '2'",
        ),
        ("import os\nreturn os.listdir('/tmp')", r"is \[\]"),
        ("import os\nreturn sorted(os.listdir('/'))", "'dev', 'lib'|'bin', 'dev'"),
        ("import sys\nreturn sys.stdin.read()", "is ''"),
        ("import os\nreturn [fd for fd in os.listdir('/proc/self/fd') if int(fd) > 9]", r"is \[\]"),
    ],
)
def test_what_lies_outside_stays_there(kind: str, body: str, says: str) -> None:
    reason = value(sandboxes(kind), body)
    assert re.search(says, reason), reason


@kinds
def test_programs_may_use_what_they_need(kind: str) -> None:
    body = (
        "import os, socket, subprocess, sys, tempfile, threading\n"
        "with tempfile.NamedTemporaryFile('w+') as file:\n    file.write('x')\n"
        "one, other = socket.socketpair()\none.send(b'x')\n"
        "server = socket.create_server(('127.0.0.1', 0))\nsocket.create_connection(server.getsockname(), 1)\n"
        "thread = threading.Thread(target=print)\nthread.start()\nthread.join()\n"
        "import multiprocessing\nassert multiprocessing.get_context('fork').Pool(2).map(abs, [-1]) == [1]\n"
        "done = subprocess.run([sys.executable, '-c', 'print(7)'], capture_output=True, text=True)\n"
        "return done.stdout + other.recv(1).decode()"
    )
    assert "is '7\\nx'" in value(sandboxes(kind), body)


@kinds
def test_g06_2_nothing_is_written_outside(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    name = f"escaped-{uuid.uuid4().hex}"
    code = f"import os\nfor place in ('..', '/tmp', '/dev/shm', '/var/tmp', '/', '{tmp_path}', '{ROOT}'):\n"
    code += f"    os.system(f'mkdir -p {{place}}; touch {{place}}/{name}')\n{DOUBLE}"
    assert verdict(sandboxes(kind), code, TESTS).status == "passed"
    for place in ("/tmp", "/dev/shm", "/var/tmp", "/", tmp_path, tmp_path.parent, ROOT, Path.home()):
        assert not Path(place, name).exists()


@kinds
def test_every_candidate_finds_a_fresh_folder_and_the_same_hashes(kind: str) -> None:
    pool = sandboxes(kind)
    leave = "import os\nreturn [os.listdir('.'), open('left', 'w').write('x'), hash('a')]"
    assert value(pool, leave) == value(pool, leave)


# ---- limits


@kinds
def test_g03_1_a_sleeper_is_woken(kind: str) -> None:
    began = time.monotonic()
    found = verdict(sandboxes(kind, timeout=1.0), f"import time\ntime.sleep(30)\n{DOUBLE}", TESTS)
    assert (found.status, found.passed) == ("timeout", 0)
    assert time.monotonic() - began < 20


@kinds
@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("while True: print('spam')", {"output"}),  # g04.2
        ("while True: pass", {"died", "timeout"}),
        ("import re\nre.match('(a+)+$', 'a' * 60 + 'b')", {"died", "timeout"}),
        ("x = []\nwhile True: x.append(bytearray(10**6))", {"raised"}),
        ("import os\nwhile True: os.fork()", {"raised", "timeout", "processes", "memory"}),
        ("import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(60,)).start()", {"raised"}),
        (
            "import os, time\nfor _ in range(6):\n    if os.fork() == 0:\n        x = bytearray(b'x') * (100 << 20)\n"
            "        time.sleep(60)\ntime.sleep(60)",
            {"memory"},
        ),
        ("with open('big', 'wb') as file:\n    while True: file.write(bytes(1 << 20))", {"raised"}),
        ("n = 0\nwhile True:\n    open(str(n), 'wb').write(bytes(1 << 20))\n    n += 1", {"raised"}),
        ("files = [open('/dev/null') for _ in range(1000)]", {"raised"}),
        ("open('/dev/shm/big', 'wb').write(bytes(40 << 20))", {"raised"}),
        ("import os\nos.nice(-20)\n", {"raised"}),
        ("import resource\nresource.setrlimit(resource.RLIMIT_AS, (-1, -1))", {"raised"}),
    ],
)
def test_a_limit_holds(kind: str, code: str, status: set[str]) -> None:
    pool = sandboxes(kind, timeout=2.0, cpu_seconds=1, memory_mb=256, output_kb=64)
    found = verdict(pool, f"{code}\n{DOUBLE}", TESTS)
    assert found.status in status, found
    assert found.passed == 0
    assert len(found.output.encode()) <= 64 << 10


def test_time_in_which_nobody_ran_is_not_the_candidate_s() -> None:
    """The process is stopped for a second and a half under a limit of one, while its candidate sleeps for 0.2."""
    program = (
        "import os, signal, subprocess, sys, threading\nfrom grpo_toolbox.rewards.code.canary import open_pool\n"
        "from grpo_toolbox.rewards.code.judge import judge\n"
        "from grpo_toolbox.rewards.code.problems import read_problem\n"
        "from grpo_toolbox.rewards.code.records import Limits\npool = open_pool('auto', Limits(timeout=1.0), 1)\n"
        f"code = 'import time\\ntime.sleep(0.2)\\n' + {DOUBLE!r}\n"
        f"verdict = pool.submit(judge(pool, code, read_problem({TESTS!r})))\n"
        "subprocess.Popen(['sh', '-c', f'sleep 0.1; kill -STOP {os.getpid()}; sleep 1.5; kill -CONT {os.getpid()}'])\n"
        "print(verdict.result().status)\npool.close()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "passed", done.stderr


@kinds
def test_limits_of_one_candidate_do_not_touch_another(kind: str) -> None:
    """Eight programs of 12 processes each: all of them come up, though one limit is 16."""
    code = (
        "import subprocess\nrunning = [subprocess.Popen(['sleep', '60']) for _ in range(12)]\n"
        "def double(n):\n    return 2 * n if all(one.poll() is None for one in running) else 0"
    )
    pool = sandboxes(kind, timeout=20.0)
    problem = read_problem(TESTS)
    assert problem is not None
    verdicts = [pool.submit(judge(pool, code, problem)) for _ in range(8)]
    assert [one.result().status for one in verdicts] == ["passed"] * 8


@pytest.mark.parametrize("limits", [{"timeout": 0}, {"memory_mb": 1}, {"processes": 0}, {"output_kb": -1}])
def test_limits_under_which_nothing_runs_are_refused(limits: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="must be a number of at least"):
        open_pool("auto", Limits(**limits), 1)


def run_elsewhere(kind: str, wrapper: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Judge two programs in a process that is started by `wrapper`."""
    program = (
        "import sys\nfrom grpo_toolbox.rewards.code.canary import open_pool\n"
        "from grpo_toolbox.rewards.code.judge import judge\n"
        "from grpo_toolbox.rewards.code.problems import read_problem\n"
        "from grpo_toolbox.rewards.code.records import Limits\n"
        f"pool = open_pool({kind!r}, Limits(), 1)\n"
        f"print([pool.submit(judge(pool, code, read_problem({TESTS!r}))).result().passed\n"
        f"       for code in ({DOUBLE!r}, 'def double(n): return 0', 'import os\\nwhile True: os.fork()')])\n"
        "pool.close()"
    )
    environment = {"PYTHONPATH": str(ROOT), "PATH": os.environ["PATH"], "HOME": "/tmp"}
    command = [*wrapper, "-c", program]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, cwd="/")


@kinds
def test_g05_2_a_lower_limit_of_the_host_s_is_no_silent_zero(kind: str) -> None:
    sandboxes(kind)
    lower = ["prlimit", "--fsize=4000000", "--nofile=40", "--cpu=60", sys.executable]
    done = run_elsewhere(kind, lower)
    assert done.stdout.strip() == "[1, 0, 0]", done.stderr


@kinds
def test_it_works_for_ordinary_users(kind: str) -> None:
    sandboxes(kind)
    python = "/usr/bin/python3"
    if not may_become_others() or shutil.which("setpriv") is None:
        pytest.skip("only root can try what somebody else can do")
    user = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", python]
    done = run_elsewhere(kind, user)
    if "No module named" in done.stderr or "Permission denied" in done.stderr:
        pytest.skip(f"{python} cannot run the package as another user: {done.stderr.strip()[-200:]}")
    assert done.stdout.strip() == "[1, 0, 0]", done.stderr


REFUSED = {
    "its processes cannot be counted": ["unshare", "--user", "--map-root-user"],
    "it may do nothing": ["setpriv", "--bounding-set=-all", "--inh-caps=-all"],
}
"""Roots that the kernel does not treat as one, and does not limit as anybody else."""


@kinds
@pytest.mark.parametrize("why", REFUSED)
def test_root_without_its_privileges_is_refused_in_one_line(kind: str, why: str) -> None:
    sandboxes(kind)
    if not may_become_others():
        pytest.skip("only root can give its privileges up")
    done = run_elsewhere(kind, [*REFUSED[why], sys.executable])
    assert done.returncode == 1
    assert re.search(
        r"ConfigError: reward.sandbox.*(does not come up|start more than 16)", done.stderr.splitlines()[-1]
    )
    assert "never retrieved" not in done.stderr
    assert "was destroyed" not in done.stderr


@kinds
def test_it_works_for_an_ordinary_user_who_calls_themselves_root(kind: str) -> None:
    sandboxes(kind)
    if not may_become_others():
        pytest.skip("only root can try what somebody else can do")
    user = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    done = run_elsewhere(kind, [*user, "unshare", "--user", "--map-root-user", "/usr/bin/python3"])
    if "No module named" in done.stderr or "Permission denied" in done.stderr or "unshare:" in done.stderr:
        pytest.skip(f"another user cannot run the package here: {done.stderr.strip()[-200:]}")
    assert done.stdout.strip() == "[1, 0, 0]", done.stderr


# ---- nothing is left

HOSTILE = (
    "import subprocess\nfor _ in range(3): subprocess.Popen(['sleep', '9{token}'], start_new_session=True)\n{double}",
    "import os\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0: os.execvp('sleep', ['sleep', '9{token}'])\n"
    "    os._exit(0)\nos._exit(0)",
    "import socket\nserver = socket.create_server(('0.0.0.0', {port}))\n{double}",
    "import os\nfor place in ('/tmp', '/dev/shm', '/var/tmp', '.', '..'):\n"
    "    try: open(f'{{place}}/9{token}', 'w').write('x')\n    except OSError: pass\nos._exit(0)",
    "import os, signal\nfor number in range(1, 32):\n    try: signal.signal(number, signal.SIG_IGN)\n"
    "    except OSError: pass\n    except ValueError: pass\nimport os\nos.execvp('sleep', ['sleep', '9{token}'])",
    "import threading, time\nthreading.Thread(target=time.sleep, args=(9{token},)).start()\n{double}",
    "import os, socket\none, other = socket.socketpair()\nos.kill(os.getpid(), 9)",
    "print('x' * 100000)\n{double}",
    "import os\nfor fd in range(64):\n    try: os.close(fd)\n    except OSError: pass",
    "{double}\ndef double(n): raise SystemExit",
)


@contextlib.contextmanager
def nothing_left(token: str, port: int) -> Iterator[None]:
    """Nothing that the block started, wrote or opened is there when it has been left."""
    descriptors = len(os.listdir("/proc/self/fd"))
    threads = threading.active_count()
    yield
    running = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            running += [path.parent.name] if f"9{token}".encode() in path.read_bytes() else []
    assert running == []
    for place in ("/tmp", "/dev/shm", "/var/tmp", ".", "..", "/"):
        assert not Path(place, f"9{token}").exists()
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", port), 1)
    assert len(os.listdir("/proc/self/fd")) <= descriptors
    assert threading.active_count() <= threads


def judge_hostile(kind: str, number: int) -> None:
    """Judge `number` hostile programs in a row; then nothing is left of them, nor of the pool."""
    sandboxes(kind)
    token = uuid.uuid4().int % 10**9
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with nothing_left(str(token), port):
        pool = open_pool(kind, Limits(timeout=2.0), at_once=2)
        boxes = []
        for index in range(number):
            code = HOSTILE[index % len(HOSTILE)].format(token=token, double=DOUBLE, port=port)
            found = verdict(pool, code, TESTS)
            assert found.status in ("passed", "failed", "died", "raised", "output", "timeout"), found
            boxes += [box.pid for box in pool.state.open]
        assert verdict(pool, DOUBLE, TESTS).status == "passed"
        pool.close()
    assert [pid for pid in set(boxes) if Path(f"/proc/{pid}").exists()] == []


@kinds
def test_hostile_programs_leave_no_process_no_file_no_port(kind: str) -> None:
    judge_hostile(kind, 2 * len(HOSTILE))


@pytest.mark.slow
@kinds
def test_a_thousand_hostile_programs_leave_no_process_no_file_no_port(kind: str) -> None:
    judge_hostile(kind, 1000)


@kinds
def test_a_pool_that_nobody_holds_ends_its_sandboxes(kind: str) -> None:
    sandboxes(kind)
    pool = open_pool(kind, Limits(), at_once=1)
    boxes = [box.pid for box in pool.state.open]
    thread = pool.thread
    assert boxes
    del pool
    __import__("gc").collect()
    thread.join(10)
    assert [pid for pid in boxes if Path(f"/proc/{pid}").exists()] == []


@kinds
def test_sandboxes_end_with_the_process_that_holds_them(kind: str) -> None:
    sandboxes(kind)
    program = (
        "import os, signal\nfrom grpo_toolbox.rewards.code.canary import open_pool\n"
        "from grpo_toolbox.rewards.code.box import descendants\nfrom grpo_toolbox.rewards.code.records import Limits\n"
        f"pool = open_pool({kind!r}, Limits(), 2)\nprint(*descendants(os.getpid()), flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    pids = done.stdout.split()
    assert len(pids) > 2
    until = time.monotonic() + 20
    while any(Path(f"/proc/{pid}/exe").exists() for pid in pids) and time.monotonic() < until:
        time.sleep(0.05)
    assert [pid for pid in pids if Path(f"/proc/{pid}/exe").exists()] == []


# ---- from threads and event loops


@kinds
def test_it_works_from_worker_threads_and_inside_an_event_loop(kind: str) -> None:
    pool = sandboxes(kind)
    problem = read_problem(TESTS)
    assert problem is not None
    found: list[str] = []
    workers = [threading.Thread(target=lambda: found.append(verdict(pool, DOUBLE, TESTS).status)) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert found == ["passed"] * 3

    async def all_together() -> list[str]:
        work = [pool.submit(judge(pool, code, problem)) for code in (DOUBLE, "import os\nos._exit(0)", DOUBLE)]
        return [one.status for one in await asyncio.gather(*map(asyncio.wrap_future, work))]

    assert asyncio.run(all_together()) == ["passed", "died", "passed"]


@kinds
def test_who_gives_up_waiting_leaves_nothing_running(kind: str) -> None:
    pool = sandboxes(kind)
    problem = read_problem(TESTS)
    assert problem is not None

    async def give_up() -> None:
        work = pool.submit(judge(pool, "import time\ntime.sleep(60)", problem))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.wrap_future(work), 0.3)

    asyncio.run(give_up())
    assert verdict(pool, DOUBLE, TESTS).status == "passed"
    until = time.monotonic() + 10
    while len(pool.state.open) > pool.ready + 2 and time.monotonic() < until:
        time.sleep(0.02)
    assert len(pool.state.open) <= pool.ready + 2  # those that wait, one more, and the referee


# ---- no sandbox, no run


def test_without_any_sandbox_there_is_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(limits: Limits, shown: object) -> object:
        async def start(command: Sequence[str]) -> Process:
            raise PermissionError("user namespaces are switched off")

        return start

    monkeypatch.setattr(canary, "BUILT_IN", {"bubblewrap": canary.bubblewrap, "namespaces": broken})
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError, match=r"bwrap is not installed.*switched off.*apt-get install bubblewrap") as error:
        open_pool("auto", Limits(), 1)
    assert "\n" not in str(error.value)


def test_bubblewrap_gives_way_to_namespaces(monkeypatch: pytest.MonkeyPatch) -> None:
    sandboxes("namespaces")
    monkeypatch.setenv("PATH", "/nowhere")
    pool = open_pool("auto", Limits(), 1)
    assert verdict(pool, DOUBLE, TESTS).status == "passed"
    pool.close()


@pytest.mark.parametrize("trial", range(len(TRIALS)))
def test_g05_3_a_grader_that_is_wrong_on_known_programs_is_refused(trial: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sandboxes("auto")
    code, problem, right = TRIALS[trial]
    monkeypatch.setattr(canary, "TRIALS", ((code, problem, not right),))
    with pytest.raises(ConfigError, match=r"a (right|wrong) program was judged"):
        open_pool("auto", Limits(), 1)


async def leaky(command: Sequence[str]) -> Process:
    """No sandbox at all: what the canary is there to find."""
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, stderr=pipe, limit=8 << 20)


def test_a_sandbox_with_holes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(canary, "BUILT_IN", {"bubblewrap": lambda limits, shown: leaky})
    monkeypatch.chdir("/tmp")
    with pytest.raises(ConfigError, match="can do what it must not"):
        # what is no sandbox counts everything that an ordinary user runs, and nothing for root
        open_pool("bubblewrap", Limits(memory_mb=2048, processes=4096 if os.getuid() else 64, files=1024), 1)


def test_g07_3_a_start_that_fails_is_repeated_and_one_real_verdict_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = sandboxes("auto")
    start = pool.sandbox
    failures = [1, 1]

    async def shaky(command: Sequence[str]) -> Process:
        if failures:
            failures.pop()
            raise OSError("no memory")
        return await start(command)

    fresh = Pool(shaky, view(False), Limits(), at_once=1)
    found = verdict(fresh, "def double(n): return 0", TESTS)
    assert (found.status, found.passed) == ("failed", 0)
    assert failures == []
    fresh.close()


def test_a_sandbox_that_does_not_start_is_an_error_and_no_zero() -> None:
    async def never(command: Sequence[str]) -> Process:
        raise OSError("no memory")

    pool = Pool(never, view(False), Limits(), at_once=1)
    with pytest.raises(SandboxError, match="no memory"):
        verdict(pool, DOUBLE, TESTS)
    pool.close()
    with pytest.raises(SandboxError, match="closed"):
        verdict(pool, DOUBLE, TESTS)


@pytest.mark.parametrize(
    ("tests", "message"),
    [
        ("import no_such_module\nassert double(4) == 8", "the tests cannot be run"),
        ("import os\ndouble(1)\nos._exit(3)", "whatever the candidate is"),
        ("class Own: pass\nassert double(Own()) == 8", "define the class in the setup code"),
    ],
)
def test_tests_that_cannot_be_run_are_an_error_and_no_zero(tests: str, message: str) -> None:
    pool = sandboxes("auto")
    with pytest.raises(SandboxError, match=message):
        verdict(pool, DOUBLE, tests)
    assert verdict(pool, DOUBLE, TESTS).status == "passed"


def test_answers_that_make_the_tests_break_off_are_the_candidate_s_fault() -> None:
    """A range of 10^18 numbers is a plain value; what the tests make of it is not."""
    pool = sandboxes("auto", timeout=10.0, cpu_seconds=1)
    found = verdict(
        pool, "def double(n): return range(10**18)", "total = 0\nfor one in double(4):\n    total += one\nassert total"
    )
    assert (found.status, found.passed) == ("died", 0)


# ---- sandboxes of the user's own


async def remote(command: Sequence[str]) -> Process:
    """What a sandbox elsewhere does: another interpreter, which sees nothing of this package."""
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(
        sys.executable, *command[1:], stdin=pipe, stdout=pipe, stderr=pipe, limit=8 << 20, cwd="/"
    )


def test_a_sandbox_of_the_user_s_own_plugs_in() -> None:
    pool = open_pool("test_sandbox:remote", Limits(memory_mb=2048, processes=4096), 1)
    assert verdict(pool, DOUBLE, TESTS).status == "passed"
    assert verdict(pool, "import os\nos._exit(0)", TESTS).status == "died"
    pool.close()
    with pytest.raises(ConfigError, match="no async function"):
        open_pool("test_sandbox:value", Limits(), 1)


# ---- what the watch sees


def test_descendants_and_their_memory() -> None:
    program = "import subprocess, sys\nx = bytearray(b'x') * (50 << 20)\nsubprocess.run(['sleep', '60'])"
    parent = subprocess.Popen([sys.executable, "-c", program])
    until = time.monotonic() + 20
    while not descendants(parent.pid) and time.monotonic() < until:
        time.sleep(0.02)
    below = descendants(parent.pid)
    assert len(below) == 1
    assert 50 << 20 < resident_bytes([parent.pid, *below]) < 200 << 20
    assert resident_bytes([2**22 + 1]) == 0  # nobody
    for pid in (*below, parent.pid):
        os.kill(pid, 9)
    parent.wait()
