"""Small pieces of HTML: everything that comes from a file is escaped here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape


class Html(str):
    """Text that is HTML already."""


def text(value: object) -> str:
    """Escape anything that is not `Html`."""
    return value if isinstance(value, Html) else escape(str(value))


def table(
    header: Sequence[object], rows: Iterable[Sequence[object]], *, caption: str, numeric_from: int = 1, css: str = ""
) -> Html:
    """A table with row headings in its first column.

    :param numeric_from: the first column that is aligned as numbers.
    """
    kind = [' class="num"' if number >= numeric_from else "" for number in range(len(header))]
    heads = "".join(f'<th scope="col"{k}>{text(h)}</th>' for k, h in zip(kind, header, strict=True))
    body = []
    for row in rows:
        first, *others = row
        cells = "".join(f"<td{k}>{text(cell)}</td>" for k, cell in zip(kind[1:], others, strict=True))
        body.append(f'<tr><th scope="row">{text(first)}</th>{cells}</tr>')
    style = f' class="{css}"' if css else ""
    return scrollable(
        caption,
        f"<table{style}><caption><span>{escape(caption)}</span></caption><thead><tr>{heads}</tr></thead>"
        f"<tbody>{''.join(body)}</tbody></table>",
    )


def heatmap(
    label: str,
    caption: str,
    heads: Iterable[str],
    rows: Iterable[tuple[str, list[str]]],
    *,
    css: str = "heatmap",
    group: int | None = None,
) -> Html:
    """A table of shaded cells.

    :param rows: the heading of each row and its cells, which are `<td>` elements already.
    :param group: the number of the group that it is of.
    """
    columns = "".join(f'<th scope="col">{escape(head)}</th>' for head in heads)
    body = "".join(f'<tr><th scope="row">{escape(head)}</th>{"".join(cells)}</tr>' for head, cells in rows)
    return scrollable(
        label,
        f'<table class="{css}"><caption>{escape(caption)}</caption><thead><tr><td></td>{columns}</tr></thead>'
        f"<tbody>{body}</tbody></table>",
        group=group,
    )


def scrollable(label: str, content: str, *, group: int | None = None) -> Html:
    """Content that may be wider than the screen; it takes the focus, so that a keyboard can scroll it."""
    data = "" if group is None else f' data-group="{group}"'
    return Html(f'<div class="scroll" role="region" tabindex="0" aria-label="{escape(label)}"{data}>{content}</div>')


def behind(content: str, summary: str = "The numbers as a table") -> Html:
    """A table behind a plot."""
    return Html(f'<details class="behind"><summary>{escape(summary)}</summary>{content}</details>')


def items(texts: Iterable[object], css: str = "") -> Html:
    style = f' class="{css}"' if css else ""
    return Html(f"<ul{style}>{''.join(f'<li>{text(entry)}</li>' for entry in texts)}</ul>")


def section(identifier: str, title: str, *parts: str, short: str = "") -> Html:
    """A part of the page; `short` is its name in the bar at the top."""
    content = "".join(part for part in parts if part)
    return Html(
        f'<section id="{identifier}" data-short="{escape(short or title)}" aria-labelledby="{identifier}-title">'
        f'<h2 id="{identifier}-title">{escape(title)}</h2>'
        f"{content}</section>"
    )


def plot(identifier: str, label: str, caption: str, table_behind: str, *, controls: str = "", css: str = "") -> Html:
    """A figure that the script draws, with its caption and its table."""
    style = f"plot {css}".strip()
    return Html(
        f'<figure id="figure-{identifier}">{controls}<div class="{style}" id="plot-{identifier}" role="img" '
        f'aria-label="{escape(label)}"></div><figcaption>{caption}</figcaption>{table_behind}</figure>'
    )
