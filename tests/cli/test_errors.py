"""What is wrong is said in one line on stderr, with exit status 1; wrong usage is 2."""

import re
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

import knnstore as library
from knnstore.errors import CorruptWeightsError
from knnstore.store import SavedSettings

BAD = {
    "empty.txt": (b"", "empty.txt: the file is empty"),
    "empty.jsonl": (b"", "empty.jsonl: the file is empty"),
    "blank.md": (b" \n", "blank.md: the text is empty"),
    "binary.txt": (b"GIF89a\x01\x00\x01\x00", "binary.txt: binary data (a NUL byte at 7), not text"),
    "wide.txt": ("boat".encode("utf-16"), "wide.txt: its first bytes mark it as UTF-16: save it as UTF-8"),
    "latin.txt": (b"caf\xe9", "latin.txt: not UTF-8: byte 0xe9 at 3"),
    "notext.jsonl": (b'{"id": "a", "body": "x"}\n', "notext.jsonl row 1: no 'text'"),
    "rows.jsonl": (b"\n{oops\n", "rows.jsonl row 2: not JSON: Expecting property name"),
    "twice.jsonl": (
        b'{"id": "a", "text": "boat"}\n{"id": "a", "text": "wall"}\n',
        "twice.jsonl row 2: the id 'a' was already used at twice.jsonl row 1",
    ),
    "image.png": (b"\x89PNG", "image.png: unknown kind of file; accepted kinds are .jsonl"),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("command", ["add {} --domain d", "eval {}"])
def test_a_bad_document_stops_the_run(knnstore, store, name, command):
    data, problem = BAD[name]
    Path(name).write_bytes(data)
    done = knnstore(command.format(name))
    assert (done.status, done.out) == (1, "")
    assert done.err.startswith(f"error: {problem}")
    assert done.err.count("\n") == 1


def test_skip_bad_reports_each_and_goes_on(knnstore, store):
    for name, (data, _) in BAD.items():
        Path(name).write_bytes(data)
    done = knnstore("add", *BAD, "nowhere.txt", "letters", "--domain", "mixed", "--skip-bad", "--json")
    assert (done.status, done.json["added"], done.json["skipped"]) == (0, 3, len(BAD) + 1)
    lines = done.err.splitlines()
    for (_, problem), line in zip(BAD.values(), lines, strict=False):
        assert line.startswith(f"skipped {problem}")
    assert lines[-2].startswith("skipped nowhere.txt: cannot be read: No such file or directory")
    assert lines[-1].startswith(f"left out {len(BAD) + 1} unusable documents (-v names them): ")
    # The document that stood before its double is kept.
    assert knnstore("show a --json").json["domain"] == "mixed"


def test_nothing_but_bad_documents_is_an_error(knnstore, store):
    Path("empty.txt").touch()
    done = knnstore("add empty.txt --domain d --skip-bad")
    assert done.status == 1
    assert done.err.endswith("error: no document could be used\n")


def test_very_short_and_very_long_documents(knnstore, store):
    Path("short.txt").write_text("b")
    Path("long.txt").write_text("the boat and the harbour " * 2000)
    added = knnstore("add short.txt long.txt --domain sizes --json").json
    long = knnstore("show long.txt --json").json["tokens"]
    assert long > 100 * knnstore("info --json").json["max_length"]
    assert added["tokens"] == long + 1
    assert knnstore("verify").status == 0
    assert knnstore("eval short.txt --leave-out --json").json["tokens"] == 1


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("show nothing", "no document 'nothing'"),
        ("show n-17 --domain letters", "no document 'n-17' in domain 'letters'"),
        ("remove nothing", "no document 'nothing'"),
        ("remove --domain nothing", "no domain 'nothing'"),
        ("tag nothing --add t", "no document 'nothing'"),
        ("documents --domain nothing", "no domain 'nothing'"),
        ("eval held-out.jsonl --domain nothing", "no domain 'nothing'"),
        ("generate x --domain nothing", "no domain 'nothing'"),
        ("init --model examples/tiny-lm", ".knnstore is a knnstore already"),
        ("move --store faiss --location keys", "keys"),
        ("move --store fais", "no adapter 'fais'; did you mean 'faiss'?"),
        ("move --store memory", "memory keeps nothing after the process ends"),
        ("eval nowhere.jsonl", "nowhere.jsonl: cannot be read: No such file or directory"),
        ("eval held-out.jsonl --device nonsense", "the model"),
        ("eval held-out.jsonl --device cuda:99", "the device cuda:99 does not exist: torch finds"),
        ("eval held-out.jsonl --dtype float8", "dtype must be float32, bfloat16 or float16, got 'float8'"),
        ("eval held-out.jsonl --temperature 1e-300", "temperature must be above 0"),
        ("domains --home news.jsonl", "no knnstore at news.jsonl: this is a file, a store is a folder"),
        ("remove nothing --domain nothing", "which does not exist; the domains are: letters, news"),
        ("generate x --temperature 1e-300", "--temperature must be 0 or at least 1e-06"),
        ("move --store faiss --location new --param index=" + "a" * 10**5, "faiss: index must be at most 64"),
        ("move --store faiss --location new --param index=IVF999999999,Flat", "with numbers up to 1,048,576"),
    ],
)
def test_an_error_is_one_line(knnstore, store, line, problem):
    done = knnstore(line)
    assert (done.status, done.out) == (1, "")
    assert done.err.startswith("error: ")
    assert problem in done.err
    assert done.err.count("\n") == 1


@pytest.mark.parametrize(
    "line",
    [
        "domains",
        "info",
        "verify",
        "repair",
        "db upgrade",
        "add letters --domain d",
        "generate x",
        "remove --domain x",
    ],
)
def test_without_a_store(knnstore, line):
    done = knnstore(line)
    assert (done.status, done.out) == (1, "")
    assert done.err == "error: no knnstore at .knnstore; make one with `knnstore init`\n"


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ("--model nowhere/at/all", "the model 'nowhere/at/all' cannot be loaded"),
        ("--model examples/tiny-lm --store memory", "memory keeps nothing after the process ends"),
        ("--model examples/tiny-lm --store nope", "no adapter 'nope'"),
        ("--model examples/tiny-lm --key h.77", "h.77"),
        ("--model examples/tiny-lm --metric cosine", "metric must be one of l2, ip, got 'cosine'"),
        ("--model examples/tiny-lm --param color=red", "color"),
        ("--model examples/tiny-lm --catalog mysql://x/y", "the catalog does not run on mysql"),
        ("--model examples/tiny-lm --max-length 4096", "max_length is 4096, the model takes at most 96"),
        ("--model examples/tiny-lm --max-length 8 --stride 8", "stride must be between 1 and"),
    ],
)
def test_a_store_that_cannot_be_made_leaves_nothing(knnstore, workplace, options, problem):
    before = sorted(workplace.iterdir())
    done = knnstore(f"init {options}")
    assert done.status == 1
    assert problem in done.err
    assert done.err.count("\n") == 1
    assert sorted(workplace.iterdir()) == before


@pytest.mark.parametrize(
    "line",
    [
        "",
        "nonsense",
        "init",
        "add letters",
        "eval",
        "eval held-out.jsonl --k 0",
        "eval held-out.jsonl --lambda 1.5",
        "eval held-out.jsonl --temperature 0",
        "generate x --cache-temperature nan",
        "generate x --ngrams 9",
        "generate x --temperature 0.8 --seed -1",
        "generate x --temperature 0.8 --seed 4294967296",
        "remove",
        "remove a --tag b",
        "sync - --domain d",
        "tag n-17",
        "move --store faiss --param nprobe",
    ],
)
def test_wrong_usage(knnstore, workplace, line):
    done = knnstore(*line.split()) if line else knnstore("--home .")
    assert (done.status, done.out) == (2, "")
    assert "Traceback" not in done.err


def test_another_model_at_the_same_place_is_refused(knnstore, workplace):
    model = Path("examples/tiny-lm")
    own = Path("own-lm")
    shutil.copytree(model, own)
    assert knnstore("init --model own-lm").status == 0
    assert knnstore("add letters --domain letters").status == 0
    weights = load_file(own / "model.safetensors")
    weights["transformer.wpe.weight"] += 1
    save_file(weights, own / "model.safetensors", {"format": "pt"})
    done = knnstore("eval held-out.jsonl")
    assert (done.status, done.out) == (1, "")
    assert done.err.startswith("error: the store was made with the model")
    assert done.err.count("own-lm") == 2


@pytest.mark.slow
def test_a_missing_network_is_refused_and_locks_nothing(knnstore, store):
    with library.open(store, "a") as opened:
        gate = {"name": "gate", "weights": f"{'0' * 64}.safetensors"}
        opened.save_settings(SavedSettings({"k": 16, "temperature": 2.0, "mixer": gate}))
    refused = knnstore("eval held-out.jsonl")
    assert (refused.status, refused.out) == (1, "")
    assert re.fullmatch(r"error: \S+ cannot be read .* \(`knnstore calibrate`\)\n", refused.err)
    assert knnstore("eval held-out.jsonl --lambda 0.5").status == 0
    with pytest.raises(CorruptWeightsError):
        library.load(store)
    library.load(store, "a").store.close()
    assert knnstore("add letters/first.txt --domain more").status == 0
    again = knnstore("calibrate dev.jsonl --max-k 16")
    assert again.status == 0, again.err
    assert knnstore("eval held-out.jsonl").err.startswith("settings calibrated for the whole store")
    assert re.search(r"^calibrated +for the whole store: ", knnstore("info").out, re.MULTILINE)
