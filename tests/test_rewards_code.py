"""The judge of programs: hidden tests of every form, right, wrong and hostile candidates. Ids such as g01.2 number
checked cases."""

from __future__ import annotations

from typing import Any

import pytest

from grpo_toolbox.errors import DataError
from grpo_toolbox.rewards.code.pool import Pool
from grpo_toolbox.rewards.code.problems import read_problem
from sandboxes import sandboxes, verdict

DOUBLE = "def double(n):\n    return 2 * n"


@pytest.fixture(scope="module", params=["auto", pytest.param("namespaces", marks=pytest.mark.slow)])
def pool(request: pytest.FixtureRequest) -> Pool:
    return sandboxes(request.param)


# ---- hostile candidates: none of them doubles

HOSTILE = {
    "g01: leaves politely": "import sys\nsys.exit(0)",
    "g01.2": "import os\nos._exit(0)",
    "g01.3": "def double(n):\n    raise SystemExit(0)",
    "g01: leaves inside the call, abruptly": "import os\ndef double(n):\n    os._exit(0)",
    "g01.4": "import atexit, os\natexit.register(lambda: os._exit(0))\ndef double(n):\n    return 0",
    "g01.5": "import os, sys\nif not sys.flags.optimize:\n    os.execv(sys.executable, [sys.executable, '-O',"
    " sys.argv[0]])\ndef double(n):\n    return 0",
    "g01: kills its parent": "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)",
    "g01: kills everything": "import os, signal\nos.kill(-1, signal.SIGKILL)",
    "g02.1": "import os\nprint('2 passed')\nprint('ALL TESTS PASSED')\nos._exit(0)",
    "g02.2": "class Y(int):\n    def __eq__(self, o): return True\n    def __hash__(self): return 0\n"
    "def double(n):\n    return Y(0)",
    "equal to everything": "class Y:\n    def __eq__(self, o): return True\ndef double(n):\n    return Y()",
    "never unequal": "class Y:\n    def __ne__(self, o): return False\n    def __eq__(self, o): return True\n"
    "double = lambda n: Y()",
    "is whatever class is asked for": "class M(type):\n    def __instancecheck__(c, o): return True\n"
    "    def __eq__(c, o): return True\n    __hash__ = None\nclass double(metaclass=M):\n    def __init__(s, n): pass",
    "patches builtins": "import builtins\nbuiltins.AssertionError = None\nbuiltins.isinstance = lambda *a: True\n"
    "builtins.abs = lambda x: 8\ndef double(n):\n    return 0",
    "says that nothing is raised": "import builtins\nclass Quiet(BaseException):\n    def __new__(cls, *a): pass\n"
    "builtins.AssertionError = Quiet\ndef double(n): return 0",
    "patches json": "import json\njson.dumps = lambda *a, **k: '{\"passed\": true}'\njson.loads = json.dumps\n"
    "def double(n): return 0",
    "speaks for the referee": 'import os\nfor fd in range(3, 64):\n    try: os.write(fd, b\'{"passed": true, "reason":'
    ' ""}\\n{"over": 0}\\n\' * 5)\n    except OSError: pass\ndef double(n): return 0',
    "answers beforehand": "import os\nfor fd in range(3, 64):\n    try: os.write(fd, b'{\"value\": true}\\n' * 9)\n"
    "    except OSError: pass\ndef double(n): return 0",
    "offers more names than asked for": 'import os\nfor fd in range(3, 64):\n    try: os.write(fd, b\'{"value": true,'
    ' "printed": ""}\\n{"value": {"d": [["__builtins__", null], ["double", 8]]}, "printed": ""}\\n\')\n'
    "    except OSError: pass\ndef double(n): return 0",
    "looks for the answer in its frames": "import sys, gc\ndef double(n):\n    frame = sys._getframe()\n"
    "    while frame:\n        for value in [*frame.f_locals.values(), *frame.f_globals.values()]:\n"
    "            if value == 8: return 8\n        frame = frame.f_back\n"
    "    return next((o for o in gc.get_objects() if type(o) is int and o == 8), 0)",
    "looks for the tests in its files": "import os, glob\ndef double(n):\n    for place in ('/proc/*/cmdline',"
    " '/proc/*/environ', '/proc/*/fd/*', '/tmp/**', '/harness/*', '**'):\n        for path in glob.glob(place,"
    " recursive=True):\n            try:\n                if 'assert' in open(path).read(100000) and 'double(4) == 8'"
    " in open(path).read(): return 8\n            except (OSError, ValueError): pass\n    return 0",
    "reads the wire ahead": "import os\ndef double(n):\n    for fd in range(3, 64):\n        try:\n"
    "            os.set_blocking(fd, False)\n            if b'8' in os.read(fd, 65536): return 8\n"
    "        except OSError: pass\n    return 0",
    "rewrites its harness": "import sys\nfor name, module in list(sys.modules.items()):\n    if 'inside' in name:\n"
    "        for key in list(vars(module)):\n            if callable(vars(module)[key]):\n"
    "                setattr(module, key, lambda *a, **k: True)\ndef double(n): return 0",
    "traces every call": "import sys\nsys.settrace(lambda *a: None)\nsys.setprofile(lambda *a: None)\n"
    "def double(n): return 0",
    "leaves a thread that answers": "import os, threading, time\ndef answer():\n    while True:\n"
    "        for fd in range(3, 9):\n"
    '            try: os.write(fd, b\'{"value": {"t": [true, {"d": []}]}, "printed": ""}\\n\')\n'
    "            except OSError: pass\n        time.sleep(0.001)\n"
    "threading.Thread(target=answer, daemon=True).start()\ndef double(n):\n    time.sleep(0.1)\n    return 0",
    "sends nonsense": "import os\ndef double(n):\n    for fd in range(3, 64):\n"
    "        try: os.write(fd, b'\\xff\\x00nonsense\\n')\n"
    "        except OSError: pass\n    return 0",
    "sends brackets": "import os\ndef double(n):\n    for fd in range(3, 64):\n"
    "        try: os.write(fd, b'[' * 500000 + b'\\n')\n"
    "        except OSError: pass\n    return 0",
    "sends a line without end": "import os\ndef double(n):\n    while True:\n        for fd in range(3, 64):\n"
    "            try: os.write(fd, b'x' * 65536)\n            except OSError: pass",
    "returns itself": "def double(n):\n    box = []\n    box.append(box)\n    return box",
    "returns too much": "def double(n):\n    return 'x' * 30_000_000",
    "returns without end": "def double(n):\n    while True: yield n",
    "raises what cannot be shown": "class E(Exception):\n    def __str__(self): raise E()\n    __repr__ = __str__\n"
    "def double(n):\n    raise E()",
    "raises what ends programs": "def double(n):\n    raise KeyboardInterrupt",
    "raises an exception of the judge's": "class CandidateLost(BaseException): pass\nclass CannotRun(Exception): pass\n"
    "def double(n):\n    raise CannotRun('skip me')",
    "g07.4": "x=input()\ndef double(n):\n    return 2*n",
    "g04: takes too much memory": "x = bytearray(10**10)\ndef double(n): return 2*n",
    "g04.4": "open('big','wb').truncate(10**12)\ndef double(n): return 2*n",
    "runs out of stack": "def double(n):\n    return double(n)",
    "crashes": "import ctypes\nctypes.string_at(0)",
    "is no Python": "def double(n)\n    return 2*n",
    "has a null byte": "def double(n):\n    return 2*n\x00",
    "is nested without end": "x = " + "-" * 100000 + "1\ndef double(n): return 2*n",
    "has another name": "def twice(n):\n    return 2*n",
    "is no function": "double = 8",
    "is the test": "assert True",
    "is nothing": "pass",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_or_broken_candidate_gets_nothing(pool: Pool, name: str) -> None:
    found = verdict(pool, HOSTILE[name], "assert double(4) == 8")
    assert (found.passed, found.size) == (0, 1), found
    assert found.status != "passed"


@pytest.mark.parametrize("name", HOSTILE)
def test_it_gets_nothing_from_a_table_of_calls_either(pool: Pool, name: str) -> None:
    found = verdict(pool, HOSTILE[name], [{"call": "double", "args": [4], "expected": 8}])
    assert (found.passed, found.size) == (0, 1), found


def test_after_all_of_them_a_right_program_is_right(pool: Pool) -> None:
    assert verdict(pool, DOUBLE, "assert double(4) == 8").status == "passed"


# ---- honest candidates, and what test code does with them

SUITES: dict[str, tuple[str, str]] = {
    "an assert": (DOUBLE, "assert double(4) == 8"),
    "several": (DOUBLE, "assert double(4) == 8\nassert double(-1) == -2"),
    "a loop": (DOUBLE, "for n in range(5):\n    assert double(n) == n + n"),
    "helpers of the library": (
        "def half(n):\n    return n / 2",
        "import math\nassert math.isclose(half(1), 0.5)\nassert abs(half(3) - 1.5) < 1e-9\nassert round(half(5)) == 2",
    ),
    "a module that the candidate imports": (
        "import math\ndef root(n): return n ** 0.5",
        "assert math.isclose(root(4), 2)",
    ),
    "kinds of values": (
        "def same(value): return value",
        "from collections import Counter, OrderedDict, deque\nfrom datetime import date, timedelta\n"
        "from decimal import Decimal\nfrom fractions import Fraction\n"
        "for v in (None, True, 0, -1, 10**30, 1.5, 'ä€\\ud83d', b'\\x00', (1, (2,)), [1, [2]], {1: (2,)}, {1, 2},"
        " frozenset({3}), 1j, range(3), deque([1]), Counter('aab'), OrderedDict(a=1), bytearray(b'a'), Decimal('1.10'),"
        " Fraction(1, 3), date(2020, 1, 2), timedelta(1, 2, 3), float('inf'), '', [], (), {}):\n"
        "    assert same(v) == v, v\n    assert type(same(v)) in (type(v), dict)\n"
        "assert same(float('nan')) != same(0.0)\nassert same(True) is True and same(None) is None",
    ),
    "a value of a subclass": (
        "from enum import IntEnum\nclass Colour(IntEnum):\n    red = 1\ndef f(): return Colour.red",
        "assert f() == 1",
    ),
    "a named tuple": (
        "from typing import NamedTuple\nclass P(NamedTuple):\n    x: int\n    y: int\ndef f(): return P(1, 2)",
        "assert f() == (1, 2) and f().x == 1",
    ),
    "work in place": ("def sort(items): items.sort()", "items = [3, 1, 2]\nsort(items)\nassert items == [1, 2, 3]"),
    "work in place, nested": (
        "def turn(rows):\n    rows[:] = [list(r) for r in zip(*rows[::-1])]",
        "rows = [[1, 2], [3, 4]]\nturn(rows)\nassert rows == [[3, 1], [4, 2]]",
    ),
    "exceptions": (
        "def f(n):\n    if n < 0: raise ValueError('negative')\n    return n",
        "try:\n    f(-1)\nexcept ValueError as error:\n    assert str(error) == 'negative'\nelse:\n    assert False",
    ),
    "exceptions of its own": (
        "class Broke(ValueError):\n    pass\ndef pay(n):\n    raise Broke(f'{n} short')",
        "import pytest\nwith pytest.raises(Broke, match='3 short'):\n    pay(3)\n"
        "with pytest.raises(ValueError):\n    pay(3)",
    ),
    "a class of its own, passed back": (
        "class A: pass\nclass E(Exception): pass\ndef make(kind): return kind().__class__.__name__",
        "assert make(A) == 'A' and make(E) == 'E'",
    ),
    "a class": (
        "class Stack:\n    def __init__(self): self.items = []\n    def push(self, x): self.items.append(x)\n"
        "    def pop(self): return self.items.pop()\n    def __len__(self): return len(self.items)\n"
        "    def __contains__(self, x): return x in self.items\n    def __eq__(self, o): return self.items == o.items",
        "s = Stack()\ns.push(1)\ns.push('a')\nassert len(s) == 2 and 'a' in s and 5 not in s\nassert s.pop() == 'a'\n"
        "assert s.items == [1]\nt = Stack()\nassert s != t\nt.push(1)\nassert s == t\nassert isinstance(s, Stack)\n"
        "assert bool(Stack()) is False\ns.items = [7]\nassert s.pop() == 7",
    ),
    "operators, indices, iteration, context": (
        "class V:\n    def __init__(self, x): self.x = x\n    def __add__(self, o): return V(self.x + o.x)\n"
        "    def __rmul__(self, k): return V(k * self.x)\n    def __getitem__(self, i): return self.x * i\n"
        "    def __iter__(self): return iter([self.x])\n    def __repr__(self): return f'V({self.x})'\n"
        "    def __lt__(self, o): return self.x < o.x\n    def __enter__(self): return self\n"
        "    def __exit__(self, *a): self.x = 0",
        "a = V(2)\nassert (a + V(3)).x == 5 and (3 * a).x == 6 and a[4] == 8 and list(a) == [2] and repr(a) == 'V(2)'\n"
        "assert a < V(3) and not V(3) < a and sorted([V(3), a])[0].x == 2\nwith a as b:\n    assert b.x == 2\n"
        "assert a.x == 0",
    ),
    "generators": (
        "def count():\n    n = 0\n    while True:\n        yield n\n        n += 1",
        "from itertools import islice\nassert list(islice(count(), 3)) == [0, 1, 2]\nassert next(count()) == 0\n"
        "assert 2 in count()",
    ),
    "functions of the tests": (
        "def apply(f, *a): return f(*a)\ndef order(xs, key): return sorted(xs, key=key)",
        "assert apply(lambda x: x + 1, 3) == 4\nassert apply(max, 3, 5) == 5\nassert apply(int, '7') == 7\n"
        "assert order(['bb', 'a'], key=lambda s: len(s)) == ['a', 'bb']\n"
        "assert apply(lambda n: apply(lambda m: m * 2, n), 4) == 8",
    ),
    "a function that raises, of the tests": (
        "def guard(f):\n    try: return f()\n    except ZeroDivisionError: return 'caught'",
        "assert guard(lambda: 1 / 0) == 'caught'",
    ),
    "functions that return functions": ("def adder(n): return lambda m: n + m", "assert adder(2)(3) == 5"),
    "coroutines": (
        "import asyncio\nasync def f(n):\n    await asyncio.sleep(0)\n    return n",
        "import asyncio\nassert asyncio.run(f(3)) == 3\nasync def both():\n"
        "    return await asyncio.gather(f(1), f(2))\nassert asyncio.run(both()) == [1, 2]",
    ),
    "what is printed": (
        "def greet(name): print(f'hello {name}')",
        "import io, contextlib\nheard = io.StringIO()\nwith contextlib.redirect_stdout(heard):\n    greet('you')\n"
        "assert heard.getvalue() == 'hello you\\n'",
    ),
    "an import": (
        DOUBLE,
        "from solution import double as twice\nimport solution\nassert twice(4) == solution.double(4) == 8",
    ),
    "test functions": (
        DOUBLE,
        "def test_four():\n    assert double(4) == 8\ndef test_none():\n    assert double(0) == 0",
    ),
    "parametrised": (
        DOUBLE,
        "import pytest\n@pytest.mark.parametrize('n, twice', [(4, 8), (5, 10)])\ndef test_it(n, twice):\n"
        "    assert double(n) == twice == pytest.approx(double(n))",
    ),
    "unittest": (
        DOUBLE,
        "import unittest\nclass T(unittest.TestCase):\n    def setUp(self): self.n = 4\n    def test_it(self):\n"
        "        self.assertEqual(double(self.n), 8)\n    def test_text(self):\n"
        "        self.assertIsInstance(double('a'), str)\nif __name__ == '__main__':\n    unittest.main()",
    ),
    "test classes": (DOUBLE, "class TestIt:\n    def test_it(self):\n        assert double(4) == 8"),
    "a main of its own is not run": (
        DOUBLE + "\nif __name__ == '__main__':\n    raise SystemExit",
        "assert double(4) == 8",
    ),
    "subclasses of dataclasses and the future": (
        "from __future__ import annotations\nfrom dataclasses import dataclass\n"
        "@dataclass\nclass P:\n    x: int\n    y: Q",
        "assert P(1, 2).x == 1 and P(1, 2) == P(1, 2) and P(1, 2) != P(1, 3)",
    ),
    "its own name": ("def copy(x): return x\ndef string(x): return str(x)", "assert copy(3) == 3 and string(3) == '3'"),
    "exit and quit are defined": (
        DOUBLE + "\ndef leave(): exit()\nif double(1) != 2: quit()",
        "import pytest\nassert double(4) == 8\nwith pytest.raises(SystemExit): leave()",
    ),
    "output closed": ("import sys\nsys.stdout.close()\n" + DOUBLE, "assert double(4) == 8"),
    "g03.2": (
        "import subprocess, sys\nsubprocess.Popen([sys.executable,'-c','import time; time.sleep(8)'])\n" + DOUBLE,
        "assert double(4) == 8",
    ),
    "g06.4": ("import shutil\nshutil.rmtree('.', ignore_errors=True)\n" + DOUBLE, "assert double(4) == 8"),
}


@pytest.mark.parametrize("name", SUITES)
def test_an_honest_candidate_passes(pool: Pool, name: str) -> None:
    code, tests = SUITES[name]
    found = verdict(pool, code, tests)
    assert found.status == "passed", found
    assert found.passed == found.size > 0


def test_check_of_candidate_gets_the_entry_point(pool: Pool) -> None:
    tests = "def check(candidate):\n    assert candidate(4) == 8"
    assert verdict(pool, DOUBLE, tests, entry_point="double").status == "passed"
    assert verdict(pool, "def double(n): return 0", tests, entry_point="double").status == "failed"
    assert verdict(pool, "def other(n): return 8", tests, entry_point="double").status == "failed"


def test_setup_code_is_there_before_the_candidate_s(pool: Pool) -> None:
    setup = "class Node:\n    def __init__(self, value, next=None):\n        self.value, self.next = value, next"
    code = "def length(node):\n    return 0 if node is None else 1 + length(node.next)"
    assert verdict(pool, code, "assert length(Node(1, Node(2))) == 2", setup=setup).status == "passed"


def test_a_builtin_that_the_candidate_defines_is_the_language_s_unless_it_is_the_entry_point(pool: Pool) -> None:
    cheat = "def double(n): return 0\ndef abs(x): return 0"
    assert verdict(pool, cheat, "assert abs(double(4) - 8) < 1").status == "failed"
    assert verdict(pool, "def abs(x): return x if x > 0 else -x", "assert abs(-2) == 2", entry_point="abs").passed == 1
    assert verdict(pool, "def abs(x): return 0", "assert abs(-2) == 2", entry_point="abs").passed == 0


def test_a_library_module_under_the_candidate_s_name_is_the_library_s(pool: Pool) -> None:
    cheat = "class math:\n    isclose = staticmethod(lambda *a, **k: True)\ndef half(n): return 0"
    assert verdict(pool, cheat, "assert math.isclose(half(1), 0.5)").status == "failed"


def test_objects_of_classes_that_the_tests_do_not_name_answer_no_question(pool: Pool) -> None:
    liar = "class Y:\n    def __contains__(s, x): return True\n    def __lt__(s, o): return True\n    __gt__ = __lt__\n"
    for test in (
        "assert 8 in double(4)",
        "assert double(4) < 9",
        "assert 7 < double(4)",
        "assert double(4) != double(4)",
    ):
        assert (
            verdict(pool, liar + "    def __iter__(s): return iter([])\ny = Y()\ndouble = lambda n: y", test).passed
            == 0
        )


def test_a_share_of_the_tests_is_counted(pool: Pool) -> None:
    code = "def double(n):\n    return 8 if n == 4 else 1 / 0"
    found = verdict(pool, code, "assert double(4) == 8\nassert double(5) == 10\nassert double(4) == 8\nx = double(4)")
    assert (found.status, found.passed, found.size) == ("failed", 2, 3)
    assert found.reason == "ZeroDivisionError: division by zero"
    gone = "import os\ndef double(n):\n    return 8 if n == 4 else os._exit(0)"
    found = verdict(pool, gone, "assert double(4) == 8\nassert double(5) == 10\nassert double(4) == 8")
    assert (found.status, found.passed, found.size) == ("died", 1, 3)


def test_a_preparation_that_fails_is_a_test_that_fails(pool: Pool) -> None:
    found = verdict(pool, "def f(n):\n    return 1 / n", "x = f(0)\nassert f(1) == 1")
    assert (found.status, found.passed, found.size) == ("failed", 0, 1)


# ---- tables of calls, programs


@pytest.mark.parametrize(
    ("code", "calls", "passed"),
    [
        (
            DOUBLE,
            [{"call": "double", "args": [4], "expected": 8}, {"call": "double", "args": ["a"], "expected": "aa"}],
            2,
        ),
        ("def f(x, *, y=1): return x, y", [{"call": "f", "args": [1], "kwargs": {"y": 2}, "expected": [1, 2]}], 1),
        ("def f(): return 0.1 + 0.2", [{"call": "f", "expected": 0.3}], 1),
        ("def f(): return 0.3000001", [{"call": "f", "expected": 0.3}], 0),
        ("def f(): return 1", [{"call": "f", "expected": True}], 0),
        ("def f(): return '1'", [{"call": "f", "expected": 1}], 0),
        ("def f(): return {'a': (1, 2.0)}", [{"call": "f", "expected": {"a": [1, 2]}}], 1),
        ("def f(): return {1, 2}", [{"call": "f", "expected": [1, 2]}], 0),
        ("def f(): print('x')", [{"call": "f", "expected": None}], 1),
        ("def f(): return object()", [{"call": "f", "expected": None}], 0),
        (DOUBLE, {"inputs": [[4], [5]], "outputs": [8, 11], "fn_name": "double"}, 1),
        (DOUBLE, '{"inputs": [[4], [5]], "outputs": [8, 10], "fn_name": "double"}', 2),
    ],
)
def test_a_table_of_calls_is_compared_value_by_value(pool: Pool, code: str, calls: Any, passed: int) -> None:
    assert verdict(pool, code, calls).passed == passed


@pytest.mark.parametrize(
    ("code", "stdin", "stdout", "passed"),
    [
        ("print(2 * int(input()))", "4\n", "8\n", 1),
        ("print(2 * int(input()), end='')", "4", "8\n\n", 1),
        ("print('8 ')\nprint()", "", "8", 1),
        ("print(' 8')", "", "8", 0),
        ("import sys\nprint(sum(map(int, sys.stdin)))", "1\n2\n", "3", 1),
        ("print(open(0).read(), end='')", "ä\n", "ä\n", 1),
        ("print(open('/dev/stdin').read())", "x", "x", 1),
        ("import sys\nprint(8)\nsys.exit(0)", "", "8", 1),
        ("import sys\nprint(8)\nsys.exit(1)", "", "8", 0),
        ("print(8)\n1 / 0", "", "8", 0),
        ("import os\nprint(8, flush=True)\nos._exit(0)", "", "8", 1),
        ("import atexit\natexit.register(print, 8)", "", "8", 1),
        ("if __name__ == '__main__':\n    print(8)", "", "8", 1),
        ("input()\ninput()\nprint(8)", "one line", "8", 0),
        ("import threading\nthreading.Thread(target=print, args=(8,)).start()", "", "8", 1),
        ("import os\nos.write(1, b'8')", "", "8", 1),
        ("x = 0\ndef f():\n    global x\n    x = 8\nf()\nprint(x)", "", "8", 1),
        ("print('x' * 100000)", "", "x" * 100000, 0),
    ],
)
def test_a_program_is_judged_by_what_it_prints(pool: Pool, code: str, stdin: str, stdout: str, passed: int) -> None:
    assert verdict(pool, code, [{"input": stdin, "output": stdout}]).passed == passed


def test_each_input_gets_a_fresh_process(pool: Pool) -> None:
    code = "import builtins\nn = getattr(builtins, 'n', 0) + 1\nbuiltins.n = n\nprint(n, input())"
    tests = {"inputs": ["a", "b"], "outputs": ["1 a", "1 b"]}
    assert verdict(pool, code, tests).passed == 2


def test_a_program_that_ends_the_process_that_feeds_it_gets_nothing(pool: Pool) -> None:
    code = "import os, signal\nprint(8, flush=True)\nos.kill(os.getppid(), signal.SIGKILL)"
    found = verdict(pool, code, [{"input": "", "output": "8"}, {"input": "", "output": "8"}])
    assert found.status == "died"
    assert found.passed < 2


# ---- tests that are no tests


@pytest.mark.parametrize(
    ("tests", "message"),
    [
        ("assert double(4) ==", "are no Python"),
        ("x = 3", "hold no test"),
        ("assert 1 + 1 == 2", "use nothing of the candidate's"),
        (["assert f() == 1", 3], "of no known form"),
        ([{"args": [1]}], "of no known form"),
        ({"inputs": [1]}, "known forms"),
        ({"inputs": ["1"], "outputs": []}, "one for one"),
        ([{"call": "f", "args": 3, "expected": 1}], "a list of arguments"),
        (3.5, "of no known form"),
    ],
)
def test_what_cannot_be_tests_is_a_data_error(tests: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_problem(tests)


@pytest.mark.parametrize("tests", [None, "", "  \n", [], {}])
def test_no_tests_are_no_problem(tests: Any) -> None:
    assert read_problem(tests) is None
