"""What comes from somebody else, a model's folder or a document, is data: not run, not printed raw."""

import json
import shutil
from pathlib import Path

import pytest

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


@pytest.mark.parametrize("part", ["model", "tokenizer"])
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
    else:
        mapped = {"AutoTokenizer": ["odd.Tokenizer", "odd.Tokenizer"]}
        alter(odd / "tokenizer_config.json", tokenizer_class="Odd", auto_map=mapped)
    lines = [f"--home new init --model {odd}", "--home own show letters/first.txt --text"]
    if part == "model":  # a tokenizer of no other use is read without its class, and all goes on
        lines += [f"probe-keys --model {odd} articles.jsonl", "--home own eval held-out.jsonl"]
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
    with pytest.raises(ConfigError, match=r"wants code from 'kernels-community/flash-attn3'"):
        load_model(str(odd))
