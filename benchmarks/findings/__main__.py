"""The findings of the papers on kNN-LMs, tried again on your text with your model.

    python benchmarks/findings --data DIR --model DIR --out DIR [--only NAME ...]
    python benchmarks/findings --smoke         about a minute, to see that it runs

DIR holds a folder for each domain with ``store.jsonl``, ``dev.jsonl`` and ``test.jsonl``, rows
``{"id", "text"}``, split by document. Every experiment says whether a finding was reproduced, by a rule that
stands beside it. The run may be killed and started again at any time: what is done is not done again, unless
the data, the model, the limits, the library or the experiment have changed. Writes ``results.json``,
``findings.md`` with its plots, and ``summary.md``, the page of the documentation.
"""

import argparse
import hashlib
import inspect
import json
import platform
import sys
import tempfile
import time
from dataclasses import asdict, fields
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from transformers.utils import logging

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

import report
from experiments import EXPERIMENTS
from lab import Lab
from memory import write_json
from smoke import SMOKE_LIMITS, TINY_LM, smoke_texts
from summary import page
from texts import Limits, read

from knnstore.errors import ConfigError, KnnstoreError


def say(message: str) -> None:
    """Tell what is going on, on standard error."""
    print(f"{time.strftime('%H:%M:%S')} {message}", file=sys.stderr, flush=True)


def name_of(experiment: ModuleType) -> str:
    """Return the experiment's name on the command line."""
    return experiment.__name__.rpartition(".")[2]


def run(lab: Lab, out: Path, chosen: list[ModuleType]) -> int:
    """Run the experiments that are not done yet.

    Returns:
        How many were run.
    """
    done = 0
    waiting = [experiment for experiment in chosen if result_of(lab, out, experiment) is None]
    for left, experiment in enumerate(waiting):
        ahead = sum(later.MINUTES for later in waiting[left:])
        say(f"{name_of(experiment)}; about {ahead * pace(lab, out, chosen):.0f} minutes to go")
        started = time.perf_counter()
        try:
            found = experiment.run(lab)
        except ConfigError as error:  # an engine that it needs is not installed
            say(f"{name_of(experiment)} is not run: {error}")
            continue
        values = {
            "name": name_of(experiment),
            "title": experiment.TITLE,
            "claim": experiment.CLAIM,
            "rule": experiment.RULE,
            **asdict(found),
            "seconds": time.perf_counter() - started,
            "inputs": inputs_of(lab, experiment),
        }
        write_json(out / "results" / f"{name_of(experiment)}.json", values)
        say(f"{name_of(experiment)}: {found.verdict}. {found.summary}")
        done += 1
    return done


def inputs_of(lab: Lab, experiment: ModuleType) -> str:
    """Hash of all that a result depends on, but for the library."""
    return hashlib.sha256((lab.inputs + inspect.getsource(experiment)).encode()).hexdigest()


def result_of(lab: Lab, out: Path, experiment: ModuleType) -> dict[str, Any] | None:
    """Return the result of an experiment with these inputs, if there is one."""
    file = out / "results" / f"{name_of(experiment)}.json"
    if not file.is_file():
        return None
    result: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return result if result["inputs"] == inputs_of(lab, experiment) else None


def pace(lab: Lab, out: Path, chosen: list[ModuleType]) -> float:
    """By which factor experiments have taken longer here than `MINUTES` says."""
    done = [(found["seconds"], of.MINUTES) for of in chosen if (found := result_of(lab, out, of))]
    return sum(seconds / 60 for seconds, _ in done) / sum(minutes for _, minutes in done) if done else 1.0


def write(lab: Lab, out: Path) -> None:
    """Write all results that there are with these inputs, as JSON, Markdown and plots."""
    known = {experiment: result_of(lab, out, experiment) for experiment in EXPERIMENTS}
    results = [found for found in known.values() if found is not None]
    on_gpu = lab.base.lm.device.type == "cuda"
    place = torch.cuda.get_device_name() if on_gpu else platform.machine()
    weights = sum(weight.numel() for weight in lab.base.lm.base.parameters())
    about = {
        "command": "python benchmarks/findings --data DATA --model MODEL --out OUT",
        "model": f"The model is `{Path(lab.model).resolve().name}` of {weights / 1e6:.1f} million weights",
        "limits": asdict(lab.limits),
        "domains": {domain: described(lab, domain) for domain in lab.domains},
        "not_run": [experiment.TITLE for experiment, found in known.items() if found is None],
        "machine": f"{place}, {torch.get_num_threads()} threads, torch {torch.__version__}",
    }
    write_json(out / "results.json", {**about, "findings": results})
    report.draw(results, out / "findings")
    (out / "findings.md").write_text(report.markdown(results, about, "findings"), encoding="utf-8")
    (out / "summary.md").write_text(page(results, about), encoding="utf-8")


def described(lab: Lab, domain: str) -> dict[str, int]:
    """How much text of a domain there is."""
    held_out = {
        f"{split}{of}": value
        for split in ("dev", "test")
        for of, value in (
            ("", len(lab.base.scored(domain, split))),
            ("_documents", len(lab.texts[domain][split])),
        )
    }
    return {"store": lab.base.stored(domain).tokens["1/1"], **held_out}


def smoke(chosen: list[ModuleType]) -> None:
    """Run experiments on texts that every installation has, and once more, which must find all of it done."""
    torch.set_num_threads(1)  # with so little to do, waiting for another thread takes longer than the work
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        for expected in (len(chosen), 0):
            with Lab(str(TINY_LM), smoke_texts(), SMOKE_LIMITS, out, "cpu", say) as lab:
                done = run(lab, out, chosen)
                assert done == expected, done
                write(lab, out)
        print((out / "findings.md").read_text(encoding="utf-8"))


def main() -> None:
    """Read the arguments and run."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    names = {name_of(experiment): experiment for experiment in EXPERIMENTS}
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, help="folder of domains")
    parser.add_argument("--model", help="folder of a causal language model")
    parser.add_argument("--out", type=Path, help="folder for results and what is kept between runs")
    parser.add_argument(
        "--only", nargs="+", choices=names, metavar="NAME", help=f"some of {', '.join(names)}"
    )
    parser.add_argument("--domains", nargs="+", default=[], metavar="DOMAIN", help="default all")
    for field in fields(Limits):
        option = f"--{field.name.replace('_', '-')}"
        parser.add_argument(
            option,
            type=str if field.name == "codes" else int,
            default=field.default,
            metavar="N",
            help=f"default {field.default}",
        )
    parser.add_argument("--device", help="default is the GPU if there is one")
    parser.add_argument("--smoke", action="store_true", help="about a minute, to see that it runs")
    options = parser.parse_args()
    chosen = [names[name] for name in options.only] if options.only else EXPERIMENTS
    if options.smoke:
        smoke(chosen)
        return
    if not (options.data and options.model and options.out):
        parser.error("name --data, --model and --out, or use --smoke")
    limits = Limits(**{field.name: getattr(options, field.name) for field in fields(Limits)})
    try:
        texts = read(options.data, options.domains, options.model, limits)
    except KnnstoreError as error:
        parser.error(str(error))
    with Lab(options.model, texts, limits, options.out, options.device, say) as lab:
        try:
            run(lab, options.out, chosen)
        finally:
            write(lab, options.out)
    print(options.out / "findings.md")


if __name__ == "__main__":
    main()
