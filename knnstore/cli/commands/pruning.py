"""The command that makes a store smaller."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

import knnstore
from knnstore.checks import printable
from knnstore.cli.inputs import Documents, ParamsOption, read_params
from knnstore.cli.models import StoreRuntime
from knnstore.cli.options import JsonOption, LeaveOutOption, LocationOption, seed_option
from knnstore.cli.output import Bar, note, print_result, table

if TYPE_CHECKING:
    from knnstore.lm import PruningCost
    from knnstore.store import Pruned


def prune(
    files: Annotated[
        list[str] | None,
        typer.Argument(metavar="FILE", help="Held-out text by which the cost is measured; `-` is stdin."),
    ] = None,
    *,
    keep: Annotated[
        float,
        typer.Option(metavar="SHARE", help="How many of each domain's tokens keep a record: 0.5 is half."),
    ] = 0.5,
    method: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="merge: the nearest records of the same token become one; known: what the model predicts "
            "anyway goes first; random.",
        ),
    ] = "merge",
    domains: Annotated[
        list[str] | None,
        typer.Option("--domain", metavar="NAME", help="Prune this domain only; repeat for several."),
    ] = None,
    leave_out: LeaveOutOption = False,
    skip_bad: Annotated[
        bool,
        typer.Option("--skip-bad", help="Report held-out documents that cannot be used, and go on without."),
    ] = False,
    seed: Annotated[int, seed_option("Of the random choice.")] = 0,
    location: LocationOption = None,
    params: ParamsOption = None,
    runtime: StoreRuntime,
    as_json: JsonOption = False,
) -> None:
    """Keep only some records of each domain.

    They are copied to a new place of the same engine and compared, the cost is measured, then the store
    switches and the old keys are removed. Interrupted before that, nothing has changed: the same command
    goes on, and `move --abandon` drops what was copied. Again when it is done, it changes nothing. A domain
    has all its records again after it was removed and added.

    Examples:
      knnstore prune dev.jsonl --keep 0.5
      knnstore prune --keep 0.25 --method random --domain letters
    """
    if method not in ("merge", "known", "random"):
        raise typer.BadParameter(f"{method!r} is none of merge, known, random", param_hint="'--method'")
    settings = read_params(params)
    cost: PruningCost | None = None
    documents = Documents(files or [], skip_bad=skip_bad)
    documents.check()
    with Bar() as bar:
        if method == "known" or files:
            with runtime.open_model("a", domains=domains) as lm:
                done = lm.prune(
                    keep, method=method, domains=domains or (), held_out=documents.read(bar),
                    leave_out=leave_out, seed=seed, location=location, params=settings,
                    on_bad=documents.skipping(bar), progress=bar,
                )  # fmt: skip
            documents.report()
            pruned, cost = done.pruned, done.cost
        else:  # no model is needed
            from knnstore.store import merge_chooser, random_chooser

            choose = merge_chooser() if method == "merge" else random_chooser(seed)
            with knnstore.open(runtime.home, "a") as store:
                pruned = store.prune(
                    keep, choose, domains=domains or (), location=location, params=settings, progress=bar
                )
    _report(pruned, cost, method, as_json=as_json)


def _report(pruned: "Pruned", cost: "PruningCost | None", method: str, *, as_json: bool) -> None:
    if pruned.left:
        note(printable(f"the old keys are left at {pruned.before.location}: {pruned.left}"))
    rows = [{"domain": domain.name, **asdict(domain)} for domain in pruned.domains]
    shown = table(rows, ["domain", "tokens", "before", "after", "merged", "dropped"])
    nothing_done = pruned.before == pruned.after
    if nothing_done:
        shown += "\nnothing was to be done: no domain has more records than that"
    elif cost is None:
        shown += "\nthe cost was not measured: give held-out text to know it"
    else:
        shown += (
            f"\nperplexity of {cost.tokens:,} held-out tokens: {cost.before_ppl:.2f} before, "
            f"{cost.after_ppl:.2f} after ({cost.change:+.1%}); {cost.base_ppl:.2f} without the store"
        )
    measured = cost and {**asdict(cost), "change": cost.change}
    print_result({**asdict(pruned), "method": method, "cost": measured}, shown, as_json=as_json)
    if not (as_json or nothing_done):
        note("`knnstore calibrate` fits the settings to what is left")
