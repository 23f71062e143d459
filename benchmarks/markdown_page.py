"""Pages whose figures a script writes: tables, and the part between two markers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: int = 1) -> Iterator[str]:
    """Markdown; the columns from `numbers` on are aligned to the right."""
    yield "| " + " | ".join(head) + " |"
    yield "|" + "|".join(" --- " if i < numbers else " ---: " for i in range(len(head))) + "|"
    for row in rows:
        yield "| " + " | ".join(row) + " |"


def put_between(page: str, generated: str, *, begin: str, end: str) -> str:
    """The page with everything from `begin` to `end` replaced. ValueError when it lacks them."""
    before, found, rest = page.partition(begin)
    _, found_end, after = rest.partition(end)
    if not found or not found_end:
        raise ValueError(f"page: wanted the lines {begin!r} and {end!r}")
    return before + generated + after
