"""Text that somebody else chose, in Markdown: what a configuration, a data set's levels or an error
says is shown, and is no tag, link, code or end of a line."""

from grpo_jax.screen import visible


def literal(text: str) -> str:
    """`text` in a line of Markdown."""
    line = _line(text).replace("\\", "\\\\")
    for mark in ("<", "`", "]("):
        line = line.replace(mark, f"{mark[:-1]}\\{mark[-1]}")
    return line


def code(text: str) -> str:
    """`text` as code in a line of Markdown."""
    return f"`{_line(text).replace('`', chr(39))}`"


def _line(text: str) -> str:
    return " ".join(visible(text).split("\n"))
