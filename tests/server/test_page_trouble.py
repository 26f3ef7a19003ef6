"""The inspector where something is refused, changes while it is open, or ends."""

import signal

import pytest
from playwright.sync_api import expect

import knnstore
from tests.server.browsing import TEXT, Opened
from tests.server.conftest import NEWS

pytestmark = pytest.mark.slow

REFUSED = "reads at most 96 tokens"
MORE_THAN_THE_PAUSE = 300
"""Milliseconds, between a movement and what the page asks because of it."""


def continue_by(page: Opened, tokens: str) -> None:
    page.page.get_by_label("tokens").first.fill(tokens)
    page.page.get_by_role("button", name="Continue").click()


def at_once(page: Opened, *controls: str) -> None:
    """Click on one after another, before anything else is done."""
    page.page.evaluate("all => all.forEach((one) => document.querySelector(one).click())", list(controls))


def held(page: Opened, path: str) -> list:
    """The requests to a path, none of which is sent on."""
    found: list = []

    def hold(route) -> None:  # no method of a list can be one
        found.append(route)

    page.page.route(path, hold)
    return found


@pytest.mark.may_say("status of 400")
def test_why_a_text_cannot_be_continued_stays_to_be_read(opened, server):
    page = opened(server)
    page.page.get_by_label("Text or prompt").fill(TEXT)
    explained = held(page, "**/v1/explain")
    with page.page.expect_request("**/v1/explain"):
        page.page.get_by_role("button", name="Explain").click()
    continue_by(page, "500")
    expect(page.page.locator("#status")).to_contain_text(REFUSED)
    expect(page.page.get_by_role("button", name="Continue")).to_be_visible()
    assert len(explained) == 1, "an explanation wipes the reason away"
    at_once(page, "#controls input", "#continue")
    page.page.wait_for_timeout(MORE_THAN_THE_PAUSE)
    expect(page.page.locator("#status")).to_contain_text(REFUSED)
    assert len(explained) == 1
    page.page.route("**/v1/explain", lambda route: route.continue_())
    page.explain()
    expect(page.page.locator("#status")).to_have_text("")


def test_what_was_asked_at_once_is_not_asked_again(opened, server):
    page = opened(server)
    page.explain()
    page.answered(lambda: at_once(page, "#controls input", "#explain"))
    page.page.wait_for_timeout(MORE_THAN_THE_PAUSE)
    assert page.asked.count(f"{server.url}/v1/explain") == 2


def test_numbers_are_asked_for_where_they_are_used(opened, server):
    page = opened(server)
    page.explain()
    written = held(page, "**/v1/completions")
    for wrong in ("", "0", "501", "1.5"):
        continue_by(page, wrong)
        assert page.page.evaluate("document.activeElement.id") == "length"
    page.explain()  # does not use them
    page.page.get_by_label("temperature", exact=True).first.fill("0.75")
    assert written == []
    with page.page.expect_request("**/v1/completions"):
        continue_by(page, "1")


def test_while_the_model_writes_nobody_else_does(opened, server):
    page = opened(server)
    text, explain = page.page.get_by_label("Text or prompt"), page.page.get_by_role("button", name="Explain")
    text.fill("The council voted to")
    written = held(page, "**/v1/completions")
    with page.page.expect_request("**/v1/completions"):
        continue_by(page, "6")
    text.press("Control+Enter")
    text.press_sequentially("XXXX")
    expect(explain).to_be_disabled()
    answer = page.answered(written[0].continue_)
    assert answer["asked"]["text"].startswith("The council voted to")
    assert "XXXX" not in answer["asked"]["text"]
    assert page.asked.count(f"{server.url}/v1/explain") == 1
    assert page.page.locator("#tokens .written").count() > 0
    text.press_sequentially("XXXX")
    assert text.input_value().count("XXXX") == 1


def test_what_is_chosen_belongs_to_a_text_and_is_not_scrolled_to_again(opened, server):
    page = opened(server, viewport={"width": 1280, "height": 400})
    page.explain(TEXT * 3)
    page.tokens.last.click()
    page.page.evaluate("scrollTo(0, 0)")
    page.answered(lambda: page.page.get_by_role("slider", name="λ", exact=True).press("ArrowLeft"))
    assert page.page.evaluate("scrollY") == 0
    expect(page.page.locator("#tokens [aria-selected=true]")).to_have_count(1)
    page.tokens.nth(1).click()
    page.explain("The boat went out.")
    expect(page.page.locator("#tokens [aria-selected=true]")).to_have_count(0)
    expect(page.panel.get_by_role("heading").first).to_have_text("Documents")
    page.page.get_by_label("Text or prompt").fill("")
    page.page.get_by_role("checkbox").first.uncheck()
    expect(page.panel).to_be_hidden()


def test_on_a_phone_the_chosen_token_is_not_under_its_details(opened, server):
    page = opened(server, viewport={"width": 400, "height": 800}, has_touch=True)
    page.explain(TEXT * 5)
    page.tokens.nth(4).click()
    page.page.keyboard.press("End")
    token, panel = page.page.evaluate(
        """[...document.querySelectorAll("#tokens [aria-selected=true], #panel")]
             .map((one) => one.getBoundingClientRect()).map((box) => [box.top, box.bottom])"""
    )
    assert 0 <= token[0] < token[1] <= panel[0]


@pytest.mark.may_say("status of 404|net::ERR_")
def test_a_domain_that_goes_and_a_server_that_dies_are_said(opened, serve):
    running = serve().ready()
    page = opened(running)
    page.explain()
    page.answered(page.page.get_by_role("checkbox", name="letters").uncheck)
    assert running.call("DELETE", "/v1/domains", params={"domain": "news"}).status_code == 200
    page.page.get_by_role("button", name="Explain").click()
    expect(page.page.locator("#status")).to_have_text(
        "A domain is not there any more. Ask again, of those that are."
    )
    expect(page.page.get_by_role("checkbox")).to_have_count(1)
    expect(page.page.get_by_role("checkbox")).not_to_be_checked()
    assert page.explain()["asked"]["model"] == "tiny"
    expect(page.page.locator("#status")).to_have_text("")
    expect(page.page.get_by_role("slider")).to_have_count(0)  # nothing is searched

    page.page.get_by_label("Text or prompt").fill("The")
    text = page.page.get_by_label("Text or prompt").element_handle()
    continue_by(page, "90")
    page.page.wait_for_function("text => text.value.length > 3", arg=text)
    running.end(signal.SIGKILL)
    expect(page.page.locator("#status")).to_have_text("The server cannot be reached.")


def test_a_store_without_keys_has_none_to_move(opened, serve, model_path, tmp_path):
    lm = knnstore.create(tmp_path / "keyless", str(model_path), key=None)
    with lm.store:
        lm.add([{"id": id, "text": text} for id, text in NEWS.items()], domain="news")
    page = opened(serve(home=tmp_path / "keyless").ready())
    answer = page.explain(NEWS["n-17"])
    assert any(token["lambda"] > 0 for token in answer["data"])
    expect(page.page.get_by_role("slider")).to_have_count(0)
    for at in range(0, len(answer["data"]), 3):
        page.tokens.nth(at).click()
        assert page.said_wrongly() == []


@pytest.mark.may_say("status of 40[13]|status of 503")
def test_another_key_can_be_given_where_one_is_not_enough(opened, serve, home, make_key):
    read, predict = ("--right", "read"), ("--right", "predict")
    keys = {lacks: make_key(home, *rights) for lacks, rights in (("predict", read), ("read", predict))}
    both = make_key(home, *read, *predict)
    page = opened(serve("--require-keys").ready())
    asked, use = page.page.get_by_label("asks for a key"), page.page.get_by_role("button", name="Use key")
    for lacks, key in keys.items():
        asked.fill(key)
        use.click()
        expect(page.page.locator("#status")).to_contain_text(f"lacks the right '{lacks}'")
        page.page.reload()
    asked.fill(both)
    use.click()
    page.explain()
