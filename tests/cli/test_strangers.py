"""What comes from somebody else, a model's folder or a document, is data: not run, not printed raw."""

import json
import os
import pty
import re
import shutil
import sqlite3
import subprocess
import sys
import tty
from pathlib import Path

import pytest

import knnstore as knnstore_package
from knnstore.errors import ConfigError
from knnstore.lm import load_model

CODE = """
from pathlib import Path
Path("ran").touch()
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
class Config(GPT2Config):
    model_type = "odd"
class Model(GPT2LMHeadModel):
    config_class = Config
class Tokenizer(PreTrainedTokenizerFast):
    pass
"""


def alter(file: Path, **values: object) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


@pytest.mark.parametrize("part", ["model", "head", "tokenizer"])
@pytest.mark.filterwarnings("ignore:builtin type Swig")
def test_the_code_of_a_models_folder_is_never_run(knnstore, store, tmp_path, part):
    """Not even where the user says yes to whoever asks: nobody does."""
    odd = tmp_path / "odd"
    shutil.copytree("examples/tiny-lm", odd)
    assert knnstore(f"--home own init --model {odd}").status == 0
    assert knnstore("--home own add letters --domain letters").status == 0
    (odd / "odd.py").write_text(CODE)
    if part == "model":
        mapped = {"AutoConfig": "odd.Config", "AutoModelForCausalLM": "odd.Model"}
        alter(odd / "config.json", model_type="odd", auto_map=mapped)
    elif part == "head":  # the configuration is one that transformers knows, and needs no code
        alter(odd / "config.json", model_type="t5", auto_map={"AutoModelForCausalLM": "odd.Model"})
    else:
        mapped = {"AutoTokenizer": ["odd.Tokenizer", "odd.Tokenizer"]}
        alter(odd / "tokenizer_config.json", tokenizer_class="Odd", auto_map=mapped)
    lines = [f"--home new init --model {odd}", "--home own show first.txt --text"]
    if part == "model":  # a tokenizer of no other use is read without its class, and all goes on
        lines.append("--home own eval held-out.jsonl")
    for line in lines:
        done = knnstore(*line.split(), stdin=b"y\n" * 9)
        assert "?" not in done.out + done.err
        assert done.status in (0, 1)
        if done.status:
            assert done.err.startswith("error: the ")
            assert done.err.count("\n") == 1
    assert not Path("ran").exists()
    with pytest.raises(ConfigError, match="runs no code that comes with a model"):
        load_model(str(odd), trust_remote_code=True)


def test_a_model_that_wants_a_repository_s_code_is_refused(model, tmp_path):
    odd = tmp_path / "odd"
    shutil.copytree(model, odd)
    alter(odd / "config.json", attn_implementation="kernels-community/flash-attn3")
    with pytest.raises(ConfigError, match=r"needs code from 'kernels-community/flash-attn3'"):
        load_model(str(odd))


STEERING = "\x1b]52;c;ZXZpbA==\x07\x9b2J\x7f\u202e\u2066\u200b\r"


def steering(text: str) -> set[str]:
    return {char for char in text if char in STEERING and not char.isprintable()}


def at_a_terminal(*arguments: str) -> str:
    """What a command writes on a terminal."""
    main, terminal = pty.openpty()
    tty.setraw(terminal)  # it would add \r
    command = [sys.executable, "-c", "from knnstore.cli import main; main()", *arguments]
    with os.fdopen(main, "rb", buffering=0) as shown:
        subprocess.run(command, stdout=terminal, stderr=subprocess.PIPE, check=True)
        os.close(terminal)
        return shown.read(100_000).decode()


@pytest.mark.slow
def test_nothing_that_is_printed_steers_a_terminal(knnstore, store):
    text = f"a{STEERING}b\tc\nd"
    row = {"id": f"x{STEERING}\ny", "text": text, "metadata": {STEERING: [STEERING]}}
    Path("evil.jsonl").write_text(json.dumps(row) + "\n")
    domain = f"evil{STEERING}\nfake: removed"
    id = row["id"]
    lines = (
        ["add", "evil.jsonl", "--domain", domain],
        ["tag", id, "--add", f"t{STEERING}\nu"],
        ["documents"],
        ["domains"],
        ["show", id],
        ["eval", "held-out.jsonl", "--domain", "none"],
        ["generate", text, "--max-new-tokens", "1", "--explain"],
        ["explain", text],
        ["remove", "--document", id],
    )
    for line in lines:
        for options in ([], ["--json"]):
            if line[0] == "remove" and options:
                assert knnstore("add", "evil.jsonl", "--domain", domain).status == 0
            done = knnstore(*line, *options)
            exact = line[0] == "generate" and not options
            assert exact or not steering(done.out + done.err), line
            if line[0] in ("tag", "remove"):
                assert done.out.count("\n") == 1
            if options and done.status == 0:
                json.loads(done.out)


@pytest.mark.slow
def test_text_is_exact_in_a_pipe_and_harmless_at_a_terminal(knnstore, store):
    """A script gets what the tokens say, byte for byte; people see what would steer their terminal."""
    text = f"the boat \x1b[31m{STEERING} – été\u200d\tend"
    Path("evil.txt").write_text(text)
    assert knnstore("add evil.txt --domain evil").status == 0
    assert knnstore("show evil.txt --text").out.endswith(f"\n\n{text}\n")
    assert knnstore("generate", text, "--max-new-tokens", "1").out.startswith(text)
    shown = at_a_terminal("show", "evil.txt", "--text")
    assert not steering(shown)
    assert r"the boat \x1b[31m\x1b]52;c;ZXZpbA==\x07\x9b2J\x7f\u202e" in shown
    assert "– été\u200d\tend" in shown
    assert knnstore("show evil.txt --text --json").json["text"] == text


def test_only_one_module_prints():
    source = Path(knnstore_package.__file__).parent
    for path in [*source.rglob("*.py")]:
        # The two modules of chat templates print to each other, through a pipe.
        if (
            path.name not in ("output.py", "reference.py", "template_process.py")
            and "testing" not in path.parts
        ):
            printing = r"typer\.echo|(?<![\w.])print\((?!.*file=process\.stdin)|std(out|err)\.write"
            assert not re.search(printing, path.read_text()), path


def nested(depth: int) -> dict[str, object]:
    value: object = "bottom"
    for _ in range(depth):
        value = {"in": value}
    return {"in": value}


@pytest.mark.parametrize("depth", [65, 480, 950, 100_000])
def test_metadata_that_is_nested_deep_is_refused(knnstore, store, depth):
    row = '{"id": "deep", "text": "boat", "metadata": ' + '{"in": ' * depth + "1" + "}" * (depth + 1) + "\n"
    Path("deep.jsonl").write_text(row)
    done = knnstore("add deep.jsonl --domain d")
    assert (done.status, done.out, done.err.count("\n")) == (1, "", 1)
    assert "nested more than 64 deep" in done.err or "not JSON" in done.err


@pytest.mark.slow
@pytest.mark.parametrize("depth", [64, 480, 950, 100_000])
def test_metadata_that_is_nested_deep_does_not_lock_a_store(knnstore, store, depth):
    """Of a store that was made before such depth was refused, or by somebody else."""
    value = '{"in": ' * depth + "1" + "}" * depth
    with sqlite3.connect(store / "catalog.db") as catalog:
        catalog.execute("UPDATE knnstore_documents SET metadata = ? WHERE external_id = 'n-17'", [value])
    assert len(knnstore("documents --json").json) == 5
    shown = knnstore("show n-17")
    assert shown.status == 0
    assert knnstore("show n-17 --json").json["id"] == "n-17"
    tagged = knnstore("tag n-17 --add t")
    assert tagged.status == (0 if depth == 64 else 1)
    assert "Error" not in tagged.err
    assert knnstore("tag n-18 --add t").status == 0
    assert knnstore("remove n-17").status == 0
