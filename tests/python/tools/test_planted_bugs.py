"""Bugs to plant in the CUDA kernels: each finds its place, and what counts as caught."""

from pathlib import Path

import planted_bugs
import pytest
from planted_bugs import BUGS, Bug, Outcome, PlantError, judge, planted_text

LEAST_BUGS = 10
VALUE = """TEST CASE:  sums

x.cc:1: ERROR: CHECK( error < kMost ) is NOT correct!
  values: CHECK( 0.5 <  0.001 )
"""


def test_names_are_unique() -> None:
    names = [bug.name for bug in BUGS]
    assert len(names) >= LEAST_BUGS
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_text_is_in_its_file_once(bug: Bug) -> None:
    assert bug.new in planted_text(bug)
    assert bug.new != bug.old
    for source in (
        planted_bugs.TESTS / f"{bug.test}_test.cc",
        *(planted_bugs.CUDA / name for name in bug.sources),
    ):
        assert (planted_bugs.ROOT / source).is_file()


@pytest.mark.parametrize(("old", "count"), [("there is no such text", 0), ("#include", 9)])
def test_text_that_is_not_there_once_is_refused(
    old: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planted_bugs, "ROOT", tmp_path)
    (tmp_path / planted_bugs.CUDA).mkdir(parents=True)
    (tmp_path / planted_bugs.CUDA / "x.h").write_text("#include\n" * 9)
    with pytest.raises(PlantError, match=f"got its text {count} times in x.h, want once"):
        planted_text(Bug("some", "x.h", old, "", "x"))


@pytest.mark.parametrize(
    ("outcome", "caught", "by"),
    [
        (Outcome(0, "[doctest] Status: SUCCESS!"), False, "the test passes"),
        (Outcome(None, ""), False, "no end in"),
        (Outcome(127, "error while loading shared libraries"), False, "status 127"),
        (Outcome(1, VALUE), True, "value: CHECK( 0.5 <  0.001 ) in: sums"),
        (Outcome(1, "x.cc:1: ERROR: CHECK( a == b ) is NOT correct!"), True, "value: CHECK( a =="),
        (Outcome(1, "x.cc:1: ERROR: row 6: got nan, want 2"), True, "value: row 6: got nan"),
        (Outcome(1, "ERROR: test case THREW exception: not aligned"), True, "detector: not al"),
        (Outcome(-6, ""), True, "ended by signal 6"),
    ],
)
def test_verdict(outcome: Outcome, caught: bool, by: str) -> None:
    verdict = judge(outcome)
    assert verdict.caught == caught
    assert verdict.by.startswith(by)


def test_bugs_that_are_not_caught_fail_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(planted_bugs.Builder, "read_commands", lambda self: None)
    monkeypatch.setattr(planted_bugs.Builder, "run_test", lambda *_: Outcome(0, ""))
    assert planted_bugs.main(["--build", str(tmp_path), "--only", BUGS[0].name]) == 1
    assert "NOT CAUGHT" in capsys.readouterr().out


def test_turns_come_to_every_bug() -> None:
    turns = -(-len(BUGS) // planted_bugs.TURN_BUGS)
    assert {name for turn in range(5, 5 + turns) for name in planted_bugs.of_turn(turn)} == {
        bug.name for bug in BUGS
    }
