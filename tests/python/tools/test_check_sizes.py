"""The size limits fire."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def sizes() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_sizes", ROOT / "scripts/check_sizes.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


CPP = """
// a { brace in a comment, and "one in a string {"
namespace n {
struct S { int a = 0; };
const char* kText = "({";
template <class A, class B>
Thing::Thing(std::map<int, int> a, int b) : a_(a), b_{b} {
  if (b) { return; }
}
int F(int a, int b, int c, int d, int e, int f, int g) const noexcept {
  auto fn = [](int x) { return x; };
  return fn(a);
}
int Declared(int a);
}  // namespace n
"""


def test_cpp_functions(sizes: ModuleType) -> None:
    found = [(f.name, f.lines, f.parameters) for f in sizes.cpp_functions(CPP)]
    assert found == [("Thing::Thing", 4, 2), ("F", 4, 7)]


def test_python_functions(sizes: ModuleType) -> None:
    source = "class A:\n    def f(self, a, b, c, *, d=1):\n        return a\n"
    (found,) = sizes.python_functions(source)
    assert (found.name, found.lines, found.parameters, found.positional) == ("f", 2, 4, 3)


def test_offenders_are_named(
    sizes: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("long.cc").write_text("int F() {\n" + "  G();\n" * 90 + "}\n" + "\n" * 600)
    Path("wide.cc").write_text("int F(int a, int b, int c, int d, int e, int f, int g) {}\n")
    Path("wide.py").write_text("def f(a, b, c):\n    pass\n")
    found = [list(sizes.complaints(Path(n))) for n in ("long.cc", "wide.cc", "wide.py")]
    assert [len(lines) for lines in found] == [2, 1, 1]
    assert "at most 600" in found[0][0] and "92 lines, at most 80" in found[0][1]
    assert "7 parameters" in found[1][0] and "3 by position" in found[2][0]
