"""The results on one page: a table of verdicts, a line each."""

from collections.abc import Mapping, Sequence
from typing import Any

from report import table

PAGE = """# Findings of the papers, on real text

What papers on nearest-neighbor language models report, and what `knnstore` adds, tried on {kinds} kinds of
text by one command, which writes this page and beside it a report with all figures, intervals and plots:

    {command}

{model}. {amounts} Settings are chosen on `dev`; what is said is of `test`, on which nothing was chosen. Each
verdict follows a rule that stands in the report, with intervals of 95 % by document: *reproduced* where it
held in three of four texts, *not reproduced* where the contrary held in half of them. Rules that were mended
when figures were known say so there.

Read it for what it is: one small model, small stores, a few kinds of text. What is found again here need not
hold for large models; what is not found refutes no paper that had a thousand times more data.

{table}
{not_run}
All together took {seconds:,.0f} s on {machine}.

## The texts

A folder for each domain with `store.jsonl`, `dev.jsonl` and `test.jsonl`, rows `{{"id", "text"}}`, split by
document; `scripts/make-data FOLDER TEXT...` makes one of any text. Here: {texts}. Of each split the first
documents, up to {store:,} tokens to store and {held_out:,} of `dev` and `test`; there at least 12 documents,
and of each the first {characters:,} characters.
"""


def page(results: Sequence[Mapping[str, Any]], about: Mapping[str, Any]) -> str:
    """Write the page; the arguments are those of the report."""
    limits, texts = about["limits"], about["domains"]
    rows = [[str(at), of["title"], of["verdict"], of["summary"].partition(". ")[0].rstrip(".") + "."]
            for at, of in enumerate(results, 1)]  # fmt: skip
    stored = [of["store"] for of in texts.values()]
    return PAGE.format(
        command=about["command"],
        model=about["model"],
        amounts=f"Stores hold {min(stored):,} to {max(stored):,} tokens.",
        table="\n".join(table(["", "finding", "verdict", "what was seen"], rows)),
        not_run=f"\nNot run here: {'; '.join(about['not_run'])}.\n" if about["not_run"] else "",
        seconds=sum(of["seconds"] for of in results),
        machine=about["machine"],
        kinds=len(texts),
        texts=", ".join(f"{name} ({of['test_documents']} documents of test)" for name, of in texts.items()),
        store=limits["store_tokens"],
        held_out=limits["held_out_tokens"],
        characters=limits["held_out_characters"],
    )
