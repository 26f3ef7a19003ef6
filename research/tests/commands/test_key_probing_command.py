"""The command that compares where keys can be taken."""

import pytest


@pytest.mark.slow
def test_probing_tells_what_further_states_are_worth(knnstore, workplace):
    command = "research probe-keys --model examples/tiny-lm articles.jsonl --key ffn_input --json --states"
    probed = knnstore(f"{command} 2")
    assert probed.status == 0, probed.err
    joined = [one for one in probed.json["candidates"] if one["states"] == 2]
    assert [one["dim"] for one in joined] == [16]
    single = min(one["ppl"] for one in probed.json["candidates"] if one["states"] == 1)
    assert joined[0]["ratio_to_one_state"]["ppl"] == pytest.approx(joined[0]["ppl"] / single)
    assert "2 states: " in probed.err
    best = probed.json["best"]
    assert f"--states {best['states']} --metric" in probed.err
    none = knnstore(f"{command} 1")
    assert {one["states"] for one in none.json["candidates"]} == {1}
