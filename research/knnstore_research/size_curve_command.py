"""The command ``size-curve``: perplexity with ever smaller parts of the store."""

from knnstore.cli.inputs import Documents
from knnstore.cli.models import StoreRuntime
from knnstore.cli.options import JsonOption
from knnstore.cli.output import Bar, format_table, print_result
from knnstore.cli.retrieval_options import ScoringQuery, SelectionOptions


def size_curve(
    *,
    selected: SelectionOptions,
    query: ScoringQuery,
    documents: Documents,
    runtime: StoreRuntime,
    as_json: JsonOption = False,
) -> None:
    """Measure perplexity with parts of the stored text: a 64th, a 32nd and so on, up to the whole.

    The table shows how much more text would help. The first row is the model alone. A part has whole stored
    documents, chosen at random, and the settings are the same for all parts. The held-out documents must not
    be in the store. Each part takes as long as `knnstore eval`.

    Examples:
      knnstore research size-curve held-out.jsonl
      knnstore research size-curve held-out.jsonl --domain news --json
    """
    documents.check_files()
    with Bar() as bar, runtime.open_model("r", domains=selected.domains) as lm:
        from knnstore_research.size_curve import measure_size_curve

        settings = query.resolve_settings(lm.store, selected.make_selection())
        points = measure_size_curve(
            lm,
            documents.read_documents(bar),
            settings,
            on_bad=documents.make_skip_function(bar),
            progress=bar,
        )
    documents.report()
    rows = [
        {"documents": one.documents, "records": one.records, **one.perplexity._asdict()} for one in points
    ]
    shown = format_table(rows, ["documents", "records", "ppl", "low", "high"])
    print_result({"points": rows, **documents.left_out}, shown, as_json=as_json)
