"""The command that measures perplexity against the size of the store."""

import pytest


@pytest.mark.slow
def test_the_curve_goes_from_the_model_alone_to_the_whole_store(knnstore, store) -> None:
    whole = knnstore("eval held-out.jsonl --json").json
    points = knnstore("research size-curve held-out.jsonl --json").json["points"]
    assert [one["documents"] for one in points] == [0, 1, 2, 3, 5]
    assert points[0]["ppl"] == pytest.approx(whole["base_ppl"])
    assert points[-1]["ppl"] == pytest.approx(whole["knn_ppl"])
    assert points[-1]["low"] < points[-1]["ppl"] < points[-1]["high"]
    assert knnstore("research size-curve held-out.jsonl").out.split()[:3] == ["documents", "records", "ppl"]
