"safe_expr: only what is on the list becomes a function, and it computes what the formula says."

import ast
import inspect

import numpy as np
import pytest

from icl26.decision.safe_expr import MAX_DEPTH, MAX_POWER, Op, UnsafeExpr, compile_expr

FUNCTIONS = {"exp": Op(np.exp, 1), "hypot": (np.hypot, 2), "where": Op(np.where, 3, True)}


def build(source, args=("x",), **kw):
    return compile_expr(source, FUNCTIONS, args, **kw)


def test_signature():
    assert list(inspect.signature(compile_expr).parameters)[:5] == ["source", "functions", "args", "max_len", "probe"]
    assert issubclass(UnsafeExpr, ValueError)


def test_random_formulas_are_what_python_computes():
    "Random trees, as text, against numpy through Python's own evaluation of the same text."
    rng, x, y = np.random.default_rng(0), np.linspace(-2, 2, 9), np.linspace(1, 3, 9)

    def tree(depth):
        if depth == 0 or rng.random() < 0.2:
            return str(rng.choice(["x", "y", f"{rng.normal():.3f}"]))
        kind = rng.integers(5)
        if kind == 0:
            return f"exp(0.1 * ({tree(depth - 1)}))"
        if kind == 1:
            return f"hypot({tree(depth - 1)}, {tree(depth - 1)})"
        if kind == 2:
            return f"where({tree(depth - 1)} {rng.choice(['<', '>', '<=', '>='])} {tree(depth - 1)}, {tree(depth - 1)}, {tree(depth - 1)})"
        if kind == 3:
            return f"-({tree(depth - 1)})"
        return f"({tree(depth - 1)}) {rng.choice(['+', '-', '*'])} ({tree(depth - 1)})"

    for _ in range(200):
        text = tree(4)
        want = eval(text, {"__builtins__": {}}, dict(x=x, y=y, exp=np.exp, hypot=np.hypot, where=np.where))  # our own text
        np.testing.assert_allclose(build(text, ("x", "y"))(x, y), want, rtol=1e-12)


def test_functions_with_assignments():
    f = build("def f(x):\n    a = x + 1\n    a = a * a\n    x = a - 2 * x\n    return x / 2")
    np.testing.assert_allclose(f(np.array([3.0])), [(16 - 6) / 2])
    assert build("def reward(x):\n  return x", name="reward")(7) == 7 and build("2 ** 3")(0) == 8.0
    with pytest.raises(TypeError, match="1 values"):
        f(1, 2)


OUTSIDE = r"""().__class__|x.T|x[0]|x[:]|(x, x)|[x]|{x}|{x: x}|'x'|b'x'|None|True|...|1j|lambda: x|x if x else x|x and x|not x|~x|+x|x // 2|x % 2|x << 1|x & 1|x @ x|x > 1|x == x
await x|(y := x)|exp(x=x)|exp(*x)|exp(x, x)|exp()|hypot(x)|open(x)|exp|__import__('os')|f'{x}'|where(x, x, x)|where(x > 0 > 1, x, x)|where(True, x, x)|exp(x)(x)|print(x)
import os|from os import *|x = 1|x += 1|del x|pass|x; x|global x|assert x|raise x|class A: pass|while x: pass|for i in x: pass|with x: pass|try: x
async def f(x): return x|def g(x): return x|def f(y): return x|def f(x, y): return x|def f(x=1): return x|def f(*x): return x|def f(x: int): return x|def f(x) -> int: return x|def f(x, /): return x|def f(*, x): return x
def f(x): pass|def f(x): return|def f(x): x|def f(x): 'doc'; return x|def f(x): a = b = x; return a|def f(x): a, b = x; return a|def f(x): a: int = x; return a|def f(x): a += x; return a
def f(x): exp = x; return x|def f(x): __a = x; return x|def f(x): return a|def f(x): a = a; return a|def f(x): return x; return x|def f(x): import os; return x|@exp\ndef f(x): return x
x ** 9|x ** -9|x ** 9.0|x ** (4 + 5)|2 ** 99|9 ** 9 ** 9|def f(x): k = 10; return x ** k|1e999|1 / 0|(-8) ** 0.5|exp(1000) + x"""


@pytest.mark.parametrize("source", [s.replace("\\n", "\n") for line in OUTSIDE.split("\n") for s in line.split("|")])
def test_everything_else_is_refused_with_its_place(source):
    with np.errstate(over="ignore"), pytest.raises(UnsafeExpr, match=r"^line \d+, column \d+: "):
        build(source)


def test_places_are_those_of_the_text():
    with pytest.raises(UnsafeExpr, match="^line 3, column 12: "):
        build("def f(x):\n    a = x\n    return a.real")
    with pytest.raises(UnsafeExpr, match="^line 1, column 5: .*unknown name 'y'"):
        build("x + y")


def test_sizes_are_limited():
    with pytest.raises(UnsafeExpr, match="2000 characters"):
        build("x" + " " * 1999 + "1")
    assert build("x" + " + x" * 20)(2.0) == 42
    for source in ("(" * 500 + "x" + ")" * 500, "-" * 1500 + "x", "x" + "+x" * 900, "exp(" * 300 + "x" + ")" * 300, "x\0"):
        with pytest.raises(UnsafeExpr):
            build(source)
    assert build("-" * (MAX_DEPTH - 2) + "x")(1.0) == 1 and build(f"x ** {MAX_POWER}")(2.0) == 256 and build("x ** 0.5")(4.0) == 2 and build("x ** 8.5")(1.0) == 1
    with pytest.raises(TypeError, match="text"):
        build(3)
    with pytest.raises(UnsafeExpr, match="got 0 statements"):
        build("")


def test_the_probe_decides_last():
    seen = []

    def probe(f):
        seen.append(f(2.0))
        if f(2.0) > 5:
            raise ValueError("too large")

    assert build("x + 1", probe=probe)(0) == 1 and seen == [3.0]
    with pytest.raises(ValueError, match="too large") as e:
        build("x * 4", probe=probe)
    assert not isinstance(e.value, UnsafeExpr)


def test_no_text_is_ever_run(monkeypatch):
    "Python's own ways to run text are not called while a formula is compiled and used."
    import builtins

    def forbidden(*args, **kw):
        raise AssertionError("text was run")

    real = builtins.compile  # ast.parse needs it, with the flag that only parses
    monkeypatch.setattr(builtins, "eval", forbidden)
    monkeypatch.setattr(builtins, "exec", forbidden)
    monkeypatch.setattr(builtins, "compile", lambda *a, **kw: real(*a, **kw) if kw.get("flags", a[3] if len(a) > 3 else 0) & ast.PyCF_ONLY_AST else forbidden())
    assert build("where(x > 0, exp(x), -x) * 2")(-1.5) == 3.0
    with pytest.raises(UnsafeExpr):
        build("__import__('os').system('true')")
