"""The inspector in a browser: every control, nothing run that was stored, nothing asked of anybody else."""

import math
import re
from collections import Counter
from collections.abc import Iterator

import pytest
from playwright.sync_api import expect

from tests.server.browsing import TEXT, Opened

pytestmark = pytest.mark.slow

EVIL_ID = '<img src=x onerror="window.hacked=1">\u202e&amp;'
EVIL_DOMAIN = "<b>d</b>\u2066+%"
EVIL_TEXT = (
    "Seven geese <script>window.hacked=1</script>\u202eevil\u0007 <img src=x onerror=window.hacked=1> sang."
)


def shares(page: Opened) -> list[float]:
    return page.page.evaluate(
        "[...document.querySelectorAll('#tokens span')].map(e => +e.style.getPropertyValue('--s'))"
    )


def share_of(token: dict, *names: str) -> float:
    return sum(part["weight"] * part["p"] for part in token["parts"] if part["name"] in names) / token["p"]


def perplexity(tokens: list[dict], name: str) -> float:
    return math.exp(-sum(math.log(token[name]) for token in tokens) / len(tokens))


def test_a_text_is_colored_by_what_gave_it(opened, server):
    page = opened(server)
    answer = page.explain()
    tokens = answer["data"]
    assert "".join(page.tokens.all_inner_texts()).replace("↵", "").replace("·", "") == TEXT
    assert page.tokens.count() == len(tokens)
    assert shares(page) == pytest.approx([share_of(token, "keys") for token in tokens], abs=1e-3)
    assert len(set(shares(page))) > 5
    page.page.get_by_role("radio", name="model").check(force=True)
    assert shares(page) == pytest.approx([share_of(token, "model") for token in tokens], abs=1e-3)
    said = page.page.locator("#summary").inner_text()
    mixed, alone = (f"{perplexity(tokens, name):.1f}" for name in ("p", "p_lm"))
    assert said.startswith(f"{mixed} perplexity with the store, {alone} by the model alone")
    label = page.tokens.nth(3).get_attribute("aria-label")
    assert re.search(rf"model alone 0?{tokens[3]['p_lm']:.2g}"[:16], label), label


def test_a_token_shows_what_caused_it_and_a_document_what_it_did(opened, server):
    page = opened(server)
    answer = page.explain()
    tokens, best = answer["data"], answer["documents"][0]
    at = next(one for one in best["positions"] if tokens[one]["causes"][0]["document"] == best["document"])
    page.tokens.nth(at).click()
    for part in tokens[at]["parts"]:
        row = page.panel.get_by_role("row", name=part["name"])
        assert f"{part['weight']:.2f}" in row.inner_text()
    cause = page.panel.locator("li.hit").first
    assert best["document"] in cause.inner_text()
    without = best["p_without"][best["positions"].index(at)]
    found = float(re.search(r"without the document p ([\d.e-]+)", cause.inner_text())[1])
    assert found == pytest.approx(without, rel=0.06)
    cause.get_by_role("button").click()
    expect(page.panel.locator("#passage")).to_contain_text(
        " ".join(tokens[at]["causes"][0]["context"].split()[-2:])
    )
    helped = {p for p, w in zip(best["positions"], best["p_without"], strict=True) if w < tokens[p]["p"]}
    marked = page.page.evaluate("[...document.querySelectorAll('#tokens .helped')].map(e => +e.id.slice(1))")
    assert set(marked) == helped
    page.panel.locator("ol.rows button").first.click()
    expect(page.page.locator("[aria-selected=true]")).to_have_count(1)
    page.panel.get_by_role("button", name="the document").click()
    page.panel.get_by_role("button", name="all documents").click()
    rows = page.panel.locator("ol.rows li").all_inner_texts()
    assert len(rows) == len(answer["documents"])
    assert best["document"] in rows[0]
    assert page.page.locator(".helped, .harmed").count() == 0


def test_the_keyboard_is_enough(opened, server):
    page = opened(server)
    keyboard, chosen = page.page.keyboard, page.page.locator("#tokens [aria-selected=true]")
    expect(page.page.get_by_label("Text or prompt")).to_be_focused()
    keyboard.insert_text(TEXT)
    answer = page.answered(lambda: keyboard.press("Control+Enter"))
    for _ in range(30):
        keyboard.press("Tab")
        if page.page.evaluate("document.activeElement.id") == "tokens":
            break
    last = len(answer["data"]) - 1
    for key, at in [("ArrowRight", 0), ("ArrowRight", 1), ("ArrowLeft", 0), ("End", last), ("Home", 0)]:
        keyboard.press(key)
        expect(chosen).to_have_id(f"t{at}")
        assert page.page.locator("#tokens").get_attribute("aria-activedescendant") == f"t{at}"
    keyboard.press("ArrowDown")
    below = int(chosen.get_attribute("id")[1:])
    newline = next(at for at, token in enumerate(answer["data"]) if "\n" in token["text"])
    assert below == newline + 1
    keyboard.press("ArrowUp")
    expect(chosen).to_have_id("t0")
    keyboard.press("Escape")
    expect(chosen).to_have_count(0)


def test_domains_and_settings_are_moved_live(opened, server):
    page = opened(server)
    saved = page.explain()
    assert saved["asked"]["model"] == "tiny+letters+news"
    assert "knn" not in saved["asked"]
    mean = sum(token["lambda"] for token in saved["data"]) / len(saved["data"])
    assert f"{mean:.2f} (bins, mean)" in page.page.locator(".slider").first.inner_text()
    news = page.page.get_by_role("checkbox", name=re.compile("news"))
    one = page.answered(news.uncheck)
    assert one["asked"]["model"] == "tiny+letters"
    none = page.answered(page.page.get_by_role("checkbox", name=re.compile("letters")).uncheck)
    assert none["asked"]["model"] == "tiny"
    assert max(shares(page)) == 0
    page.answered(page.page.get_by_role("checkbox", name=re.compile("letters")).check)
    assert page.answered(news.check)["data"] == saved["data"]

    def slide(name: str, to: int) -> dict:
        return page.answered(lambda: page.page.get_by_role("slider", name=name, exact=True).fill(str(to)))

    everything = slide("λ", 1000)
    assert everything["asked"]["knn"] == {"lam": 1.0}
    assert all(token["lambda"] == pytest.approx(1) for token in everything["data"])
    impossible = next(at for at, token in enumerate(everything["data"]) if token["p"] == 0)
    page.tokens.nth(impossible).click()
    expect(page.panel.locator(".figure")).to_have_text(re.compile("^0 model alone"))
    assert page.said_wrongly() == []
    cold = slide("T", 250)["asked"]["knn"]["temperature"]
    assert cold == pytest.approx(saved["knn"]["temperature"] / 10, rel=0.01)
    how_many = "k" if saved["knn"]["probes"] is None else "cells"
    few = slide(how_many, 0)["asked"]["knn"]
    assert few == {"lam": 1.0, "temperature": cold, "k" if how_many == "k" else "probes": 1}
    again = page.answered(page.page.get_by_role("button", name="as saved").click)
    assert again["data"] == saved["data"]
    expect(page.page.get_by_role("button", name="as saved")).to_be_hidden()


@pytest.mark.may_say("status of 400")
def test_a_prompt_is_continued_and_what_was_written_is_explained(opened, server):
    page = opened(server)
    page.page.get_by_label("Text or prompt").fill("The council voted to")
    page.page.get_by_label("tokens").first.fill("6")
    page.page.get_by_label("temperature", exact=True).first.fill("0")
    answer = page.answered(page.page.get_by_role("button", name="Continue").click)
    asked = {
        "model": "tiny+letters+news",
        "prompt": "The council voted to",
        "max_tokens": 6,
        "temperature": 0,
    }
    expected = server.call("POST", "/v1/completions", json=asked).json()["choices"][0]["text"]
    assert answer["asked"]["text"] == "The council voted to" + expected
    written = page.page.locator("#tokens .written").all_inner_texts()
    assert "".join(written).replace("↵", "").replace("·", "") == expected
    page.page.get_by_label("tokens").first.fill("500")
    explained = page.asked.count(f"{server.url}/v1/explain")
    page.page.get_by_role("button", name="Continue").click()
    expect(page.page.locator("#status")).to_contain_text("reads at most 96 tokens")
    expect(page.page.get_by_role("button", name="Continue")).to_be_visible()
    assert page.asked.count(f"{server.url}/v1/explain") == explained, "an explanation wiped the reason away"


def test_nothing_can_be_asked_before_it_is_known_what_is_there(opened, server):
    page, held = opened(server), []

    def hold(route):
        held.append(route)

    page.page.route("**/v1/models", hold)
    with page.page.expect_request("**/v1/models"):
        page.page.reload()
    explain = page.page.get_by_role("button", name="Explain")
    expect(page.page.get_by_role("status")).to_have_text("Loading …")
    expect(explain).to_be_hidden()
    held[0].continue_()
    expect(explain).to_be_visible()
    page.explain()


@pytest.mark.may_say("status of 401|status of 503")
def test_a_key_is_asked_for_and_stays_in_the_tab(opened, serve, home, make_key):
    key = make_key(home, "--right", "read", "--right", "predict", "--domain", "letters")
    page = opened(serve("--require-keys"))  # while the model is being loaded
    asked = page.page.get_by_label("asks for a key")
    for given in ("wrong", key):
        asked.fill(given)
        with page.page.expect_response("**/v1/domains"):
            page.page.get_by_role("button", name="Use key").click()
    expect(page.page.get_by_role("button", name="Explain")).to_be_visible(timeout=60_000)
    assert page.explain()["asked"]["model"] == "tiny+letters"
    assert page.page.get_by_role("checkbox").count() == 1
    expect(asked).to_be_hidden()
    kept = page.page.evaluate(
        "[JSON.stringify(localStorage), document.cookie, location.href, document.body.innerHTML]"
    )
    assert not any(key in one for one in kept)
    page.page.reload()
    expect(page.page.get_by_role("checkbox")).to_have_count(1)


@pytest.fixture
def evil(server) -> Iterator[None]:
    """A document that would like to be more than text."""
    documents = [{"id": EVIL_ID, "text": EVIL_TEXT}]
    done = server.call("POST", "/v1/documents", json={"domain": EVIL_DOMAIN, "documents": documents})
    assert done.status_code == 200, done.text
    yield
    server.call("DELETE", "/v1/domains", params={"domain": EVIL_DOMAIN})


@pytest.mark.usefixtures("evil")
def test_what_is_stored_is_only_ever_text(opened, server):
    page = opened(server)
    answer = page.explain(EVIL_TEXT[: EVIL_TEXT.index(" sang")])
    assert answer["asked"]["model"] == "tiny+<b>d</b>\u2066%2B%25+letters+news"
    for at in range(0, len(answer["data"]), 5):
        page.tokens.nth(at).hover()
        page.tokens.nth(at).click()
    page.panel.get_by_role("button", name="<img src=x").first.click()
    text = page.panel.locator("#passage")
    expect(text).to_contain_text("<script>window.hacked=1</script>‹U+202E›evil\u2407")
    title = '<b>d</b>‹U+2066›+% <img src=x onerror="window.hacked=1">‹U+202E›&amp;'
    expect(page.panel.get_by_role("heading").first).to_have_text(title)
    assert page.page.evaluate("window.hacked") is None
    assert page.page.evaluate("document.querySelectorAll('main img, main script, main b').length") == 0
    shown = page.page.locator("body").inner_text()
    assert "<script>" in shown
    assert not re.search("[\u202e\u2066\u0007]", shown)


@pytest.mark.may_say("Content Security Policy|Trusted|TrustedHTML|Refused|violates")
def test_the_browser_is_told_to_refuse_what_is_not_the_pages(opened, server):
    page = opened(server)
    page.explain()
    tried = page.page.evaluate(
        """async () => {
          const tried = {};
          try {
            document.body.lastElementChild.innerHTML = "<i>x</i>";
          } catch (error) {
            tried.html = error.name;
          }
          const script = document.createElement("script");
          try {
            script.textContent = "window.hacked = 1";
            document.body.append(script);
          } catch {}
          tried.script = window.hacked;
          tried.elsewhere = await fetch("https://example.com/").then(() => "asked", () => "refused");
          const image = new Image();
          const seen = new Promise((done) => {
            image.onload = () => done("shown");
            image.onerror = () => done("refused");
          });
          image.src = "data:image/gif;base64,R0lGODlhAQABAAAAACw=";
          return { ...tried, image: await seen };
        }"""
    )
    assert tried == {"html": "TypeError", "script": None, "elsewhere": "refused", "image": "refused"}
    head = server.call("GET", "/").headers
    policy = dict(part.split(" ", 1) for part in head["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'"
    assert not any("unsafe" in one or "http" in one or "*" in one for one in policy.values())
    page.asked[:] = [url for url in page.asked if not url.startswith(("https://example.com", "data:"))]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [375, 1200])
def test_it_fits_a_phone_and_the_dark_and_everything_has_a_name(opened, server, width, scheme):
    page = opened(
        server, viewport={"width": width, "height": 720}, color_scheme=scheme, has_touch=width < 500
    )
    page.explain()
    page.tokens.nth(4).click()
    measured = page.page.evaluate(
        """() => {
          const parts = (color) => color.match(/[\\d.]+/g).slice(0, 3).map(Number);
          const light = (color) => parts(color).reduce((sum, part) => sum + part) / 765;
          const style = getComputedStyle(document.body);
          const box = document.querySelector("#panel").getBoundingClientRect();
          const named = (one) => one.labels?.length || one.ariaLabel || one.textContent.trim();
          const kinds = "button, input, textarea, [role=option], [role=listbox]";
          const controls = [...document.querySelectorAll(kinds)];
          return {
            wide: document.documentElement.scrollWidth,
            paper: light(style.backgroundColor),
            ink: light(style.color),
            panel: [box.top < innerHeight - 100, box.right <= innerWidth],
            nameless: controls.filter((one) => !named(one)).map((one) => one.outerHTML),
          };
        }"""
    )
    assert measured["wide"] <= width
    assert measured["panel"] == [True, True]
    assert measured["nameless"] == []
    assert (measured["paper"] > 0.9) == (scheme == "light")
    assert abs(measured["paper"] - measured["ink"]) > 0.7


def test_what_a_movement_costs_does_not_grow_with_the_text(opened, server):
    """2,000 tokens stay smooth: hovering touches none of them, choosing two."""
    page = opened(server)
    answer = page.explain("The council voted to repair the harbour. " * 130)
    assert len(answer["data"]) >= 2000
    page.page.evaluate(
        """() => {
          window.touched = [];
          const note = (changes) => touched.push(...changes.map((one) => one.target.id));
          const all = { attributes: true, childList: true, subtree: true };
          new MutationObserver(note).observe(document.querySelector("#tokens"), all);
        }"""
    )
    page.tokens.nth(1500).hover()
    assert page.page.evaluate("touched") == []
    expect(page.page.get_by_role("tooltip")).to_contain_text("from the store")
    page.tokens.nth(1500).click()
    page.tokens.nth(1503).click()
    touched = Counter(page.page.evaluate("touched"))
    assert touched.keys() == {"tokens", "t1500", "t1503"}
    assert touched.total() <= 6
