"""The results as Markdown, with plots beside it."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from finding import Plot
from plots import svg
from texts import MIN_DOCUMENTS

INTRODUCTION = """# Findings of the papers, on real text

What papers on nearest-neighbor language models report, tried again with `knnstore` by one command:

    {command}

{model}. Settings are chosen on `dev` and everything below is of `test`, on which nothing was chosen; stores
are searched exactly unless it says otherwise. In brackets are intervals of 95 %, of the bootstrap over
documents. The rule of each verdict was written before its figures were seen, or says that it was not.

Read it for what it is: one model, {scale}, and a few kinds of text. That a
shape is found again here does not show that it holds for large models, and that it is not found does not
refute a paper that had a thousand times more data. The intervals are of the documents at hand; they say
nothing of other kinds of text.
"""


def markdown(results: Sequence[Mapping[str, Any]], about: Mapping[str, Any], plots: str) -> str:
    """Write the report.

    Args:
        results: of the experiments, in the order of the report.
        about: the inputs.
        plots: folder of the plots, as seen from the report.
    """
    texts = about["domains"]
    stored = [tokens["store"] for tokens in texts.values()]
    scale = (
        f"stores of {min(stored):,} to {max(stored):,} tokens" if len(stored) > 1 else f"{stored[0]:,} tokens"
    )
    lines = [INTRODUCTION.format(command=about["command"], model=about["model"], scale=scale)]
    lines += table(["domain", "stored tokens", "tokens of dev", "documents", "tokens of test", "documents"],
                   [[name, of["store"], of["dev"], of["dev_documents"], of["test"], of["test_documents"]]
                    for name, of in texts.items()])  # fmt: skip
    limits = about["limits"]
    lines += [
        "",
        "Of each split the first documents were taken, until there were "
        f"{limits['store_tokens']:,} tokens to store, and {limits['held_out_tokens']:,} of `dev` and `test`: "
        f"there at least {MIN_DOCUMENTS} documents, and of each the first {limits['held_out_characters']:,} "
        "characters.",
    ]
    if limits["documents"]:
        lines += ["", f"**A trial on at most {limits['documents']:,} documents of each split: no result.**"]
    if about["not_run"]:
        lines += ["", f"Not run, so not to be told: {'; '.join(about['not_run'])}."]
    lines += ["", "## In short", ""]
    lines += table(
        ["", "finding", "verdict"],
        [
            [str(at), f"[{of['title']}](#{anchor(of['title'])})", of["verdict"]]
            for at, of in enumerate(results, 1)
        ],
    )
    for of in results:
        lines += ["", f"## {of['title']}", "", of["claim"], "", f"*Rule:* {of['rule']}", ""]
        lines += [f"**{of['verdict'].capitalize()}.** {of['summary']}"]
        for one in of["tables"]:
            lines += [
                "",
                *([f"{one['title']}:", ""] if one["title"] else []),
                *table(one["head"], one["rows"]),
            ]
        for plot in of["plots"]:
            lines += ["", f"![{plot['title']}]({plots}/{plot['name']}.svg)"]
        lines += ["", f"{of['seconds']:,.0f} s."]
    lines += ["", f"All together {sum(of['seconds'] for of in results):,.0f} s on {about['machine']}."]
    return "\n".join(lines) + "\n"


def draw(results: Sequence[Mapping[str, Any]], folder: Path) -> None:
    """Write the plots of all results."""
    folder.mkdir(parents=True, exist_ok=True)
    for of in results:
        for plot in of["plots"]:
            (folder / f"{plot['name']}.svg").write_text(svg(Plot(**plot)), encoding="utf-8")


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    """Lines of a Markdown table."""
    return [
        "| " + " | ".join(head) + " |",
        "|" + "---|" * len(head),
        *("| " + " | ".join(map(cell, row)) + " |" for row in rows),
    ]


def cell(value: Any) -> str:
    """Format a value with three or four digits, an interval in brackets."""
    if isinstance(value, list | tuple):
        whole, low, high = map(cell, value)
        return f"{whole} ({low} – {high})"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    if isinstance(value, int):
        return f"{value:,}"
    return "–" if value is None else str(value)


def anchor(title: str) -> str:
    """Return the name by which Markdown links to a heading."""
    kept = "".join(letter for letter in title.lower() if letter.isalnum() or letter in " -_")
    return kept.replace(" ", "-")
