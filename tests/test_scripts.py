"""The programs of scripts/ that make what benchmarks read."""

import json
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from knnstore.lm.keys import locate
from knnstore.lm.reading import Encoder, load_model

REPOSITORY = Path(__file__).parents[1]


@pytest.fixture
def run(monkeypatch):
    def run(script: str, *arguments: object) -> None:
        monkeypatch.setattr(sys, "argv", [script, *map(str, arguments)])
        runpy.run_path(str(REPOSITORY / "scripts" / script), run_name="__main__")

    return run


def test_data_is_split_by_document_and_no_text_is_in_two_parts(run, tmp_path, capsys) -> None:
    rows = [{"id": str(at), "text": f"text {at // 2} " * (1 + at // 2)} for at in range(80)]  # each twice
    (tmp_path / "all.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run("make-data", tmp_path / "data", tmp_path / "all.jsonl", "--dev", "0.2")
    parts = {
        file.stem: [json.loads(line)["text"] for line in file.read_text().splitlines()]
        for file in (tmp_path / "data").iterdir()
    }
    texts = [text for part in parts.values() for text in part]
    assert sorted(texts) == sorted({row["text"] for row in rows})
    shares = {part: sum(map(len, of)) / sum(map(len, texts)) for part, of in parts.items()}
    assert 0.2 <= shares["dev"] < 0.26
    assert 0.1 <= shares["test"] < 0.16
    with pytest.raises(SystemExit, match="2"):
        run("make-data", tmp_path / "data", tmp_path / "all.jsonl")
    assert "is not empty" in capsys.readouterr().err


@pytest.mark.slow
def test_keys_are_those_of_the_model_in_the_order_of_the_text(run, tmp_path) -> None:
    texts = ["one two three", "four"]
    for name, text in zip("ab", texts, strict=True):
        (tmp_path / f"{name}.txt").write_text(text)
    folder = REPOSITORY / "examples" / "tiny-lm"
    run("make-keys", tmp_path / "k.npy", tmp_path / "a.txt", tmp_path / "b.txt", "--model", folder)
    lm, tokenizer = load_model(str(folder), device="cpu")
    encoder = Encoder(lm, locate(lm, "ffn_input"))
    expected = []
    for text in texts:
        tokens = [tokenizer.bos_token_id, *tokenizer(text, add_special_tokens=False)["input_ids"]]
        expected.append(encoder.compute_keys(torch.tensor([tokens]), torch.arange(len(tokens) - 1)))
    np.testing.assert_allclose(np.load(tmp_path / "k.npy"), torch.cat(expected).numpy(), atol=1e-2)


@pytest.mark.slow
def test_bugs_are_drawn_from_every_subject_and_change_one_line_each() -> None:
    script = runpy.run_path(str(REPOSITORY / "scripts" / "try-bugs"), run_name="imported")
    bugs = script["draw_bugs"](24, seed=1)
    assert {bug.subject for bug in bugs} == script["SUBJECTS"].keys()
    again, others = ([bug.source for bug in script["draw_bugs"](24, seed)] for seed in (1, 2))
    assert [bug.source for bug in bugs] == again != others
    for bug in bugs:
        before, after = (REPOSITORY / bug.file).read_text().splitlines(), bug.source.splitlines()
        assert [at for at, pair in enumerate(zip(before, after, strict=True), 1) if pair[0] != pair[1]] == [
            bug.line
        ]
        compile(bug.source, bug.file, "exec")
        compile(script["note_reaching"]((REPOSITORY / bug.file).read_text(), bug.node, 7), bug.file, "exec")
