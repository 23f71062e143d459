"""Shows a response in a terminal while it arrives: Markdown, wrapped at words."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar

from markdown_it import MarkdownIt
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.markdown import CodeBlock, Heading, Markdown
from rich.segment import Segment
from rich.style import Style
from rich.syntax import ANSISyntaxTheme, Syntax
from rich.text import Text
from rich.theme import Theme

if TYPE_CHECKING:
    from rich.console import RenderableType

# The terminal's own colors without the bright ones, which are unreadable on white.
_CODE_THEME = ANSISyntaxTheme(
    {
        ("Comment",): Style(dim=True),
        ("Keyword",): Style(color="blue"),
        ("Literal", "Number"): Style(color="magenta"),
        ("Literal", "String"): Style(color="green"),
        ("Name", "Builtin"): Style(color="cyan"),
        ("Name", "Class"): Style(bold=True),
        ("Name", "Decorator"): Style(color="magenta"),
        ("Name", "Function"): Style(bold=True),
        ("Name", "Tag"): Style(color="blue"),
    }
)
THEME = Theme(
    {
        "markdown.code": "bold cyan",
        "markdown.h1": "bold underline",
        "markdown.h2": "bold underline",
        "markdown.h3": "bold",
        "markdown.h4": "bold italic",
    }
)
_REFRESH_SECONDS = 0.08
_MAX_LOAD = 0.1  # share of a core that drawing may take
# HTML is shown as text, because a terminal cannot render it.
_PARSER = MarkdownIt("commonmark", {"html": False}).enable(["strikethrough", "table"])


class _LeftHeading(Heading):
    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        self.text.justify = "left"
        yield self.text


class _PlainCode(CodeBlock):
    """Code without a margin, so that it can be copied."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        code = str(self.text).rstrip()
        yield Syntax(code, self.lexer_name, theme=_CODE_THEME, word_wrap=True)


class _Markdown(Markdown):
    elements: ClassVar[dict[str, Any]] = {
        **Markdown.elements,
        "heading_open": _LeftHeading,
        "fence": _PlainCode,
        "code_block": _PlainCode,
    }

    def __init__(self, text: str) -> None:
        # A link shows its address, because a hidden one could mislead.
        super().__init__("", hyperlinks=False)
        self.parsed = _PARSER.parse(text)


class _Lines:
    """A renderable without its empty first and last lines, or only its last lines."""

    def __init__(self, content: RenderableType, *, max_lines: int | None = None) -> None:
        self._content = content
        self._max_lines = max_lines

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = console.render_lines(self._content, options.update(height=None), pad=False)
        filled = [i for i, line in enumerate(lines) if any(part.text.strip() for part in line)]
        shown = lines[filled[0] : filled[-1] + 1] if filled else lines[:1]
        for line in shown[-self._max_lines :] if self._max_lines else shown:
            yield from line
            yield Segment.line()


def split_blocks(text: str) -> list[str]:
    """Split Markdown before each of its outermost blocks, except the first."""
    lines = text.split("\n")
    starts = [token.map[0] for token in _PARSER.parse(text) if token.map and token.level == 0]
    starts = [0, *sorted({*starts[1:]}), len(lines)]
    return ["\n".join(lines[i:j]) for i, j in pairwise(starts)]


class MarkdownPrinter:
    """Prints finished blocks once and redraws the unfinished one. Use it as a context manager."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._text = ""  # what is not printed yet
        self._style = ""
        self._begins = True  # nothing has been printed in this style
        self._printed = False
        self._next_draw = 0.0

    def __enter__(self) -> MarkdownPrinter:
        self._live.start()
        self._live.update(Text("…", style="dim"), refresh=True)
        return self

    def __exit__(self, *_: object) -> None:
        """Print the rest, also after an exception."""
        try:
            self._finish()
        finally:
            self._live.stop()

    def write(self, text: str, style: str = "") -> None:
        """Add text. Text with a style is not Markdown."""
        if not text:
            return
        if style != self._style:
            self._finish()
            self._style, self._begins = style, True
        self._text += text
        if self._begins:
            self._text = self._text.lstrip("\n")
        now = time.monotonic()
        if now >= self._next_draw:
            self._draw()
            took = time.monotonic() - now
            self._next_draw = now + max(_REFRESH_SECONDS, took / _MAX_LOAD)

    def _draw(self) -> None:
        if self._style:
            length = self._text.rfind("\n", 0, len(self._text.rstrip())) + 1
            done = [self._text[: length - 1]] if length else []
        else:
            # The first characters of a line can look like another block, so only whole lines count.
            done = split_blocks(self._text[: self._text.rfind("\n") + 1])[:-1]
            length = sum(len(block) + 1 for block in done)
        self._text = self._text[length:]
        self._print(done)
        end = _Lines(self._render(self._text), max_lines=max(self._console.height - 2, 1))
        self._live.update(end, refresh=True)

    def _finish(self) -> None:
        text, self._text = self._text.rstrip(), ""
        self._live.update(Text(), refresh=True)
        if text:
            self._print([text] if self._style else split_blocks(text))

    def _print(self, blocks: list[str]) -> None:
        for block in blocks:
            if self._printed and (self._begins or not self._style):
                self._console.print()
            self._begins, self._printed = False, True
            self._console.print(_Lines(self._render(block)), end="")

    def _render(self, text: str) -> RenderableType:
        return Text(text, style=self._style) if self._style else _Markdown(text)
