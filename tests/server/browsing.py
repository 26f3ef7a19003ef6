"""The inspector in a browser of its own."""

import json
import re

from playwright.sync_api import Browser, Page, Response, expect

expect.set_options(timeout=60_000)

TEXT = "The council voted to repair the harbour.\nThe boat went out 🙂 again."


class Opened:
    """The page in a browser of its own, and what it did."""

    def __init__(self, browser: Browser, server, **options) -> None:
        self.server = server
        self.context = browser.new_context(**{"viewport": {"width": 1200, "height": 900}, **options})
        self.context.set_default_timeout(60_000)  # which only ends a test that hangs
        self.page: Page = self.context.new_page()
        self.said: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda message: self.said.append(f"{message.type}: {message.text}"))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(f"{server.url}/")

    def explain(self, text: str = TEXT) -> dict:
        """Have a text explained; return what the server said."""
        self.page.get_by_label("Text or prompt").fill(text)
        return self.answered(lambda: self.page.get_by_role("button", name="Explain").click())

    def answered(self, act) -> dict:
        """Do what asks for an explanation; return it once it is shown."""
        with self.page.expect_response("**/v1/explain") as waiting:
            act()
        answer: Response = waiting.value
        assert answer.ok, answer.text()
        said = answer.json()  # at once: a browser does not keep the bodies of answers for long
        expect(self.page.locator(".waiting")).to_have_count(0)
        return {**said, "asked": json.loads(answer.request.post_data)}

    def said_wrongly(self) -> list[str]:
        """What a program shows by mistake, of texts and names and styles that are on the page."""
        shown = self.page.evaluate(
            """() => [document.body.innerText, ...[...document.querySelectorAll("main *")].flatMap(
              (one) => [one.ariaLabel, one.title, one.getAttribute("style"), one.value].filter(Boolean))]"""
        )
        return re.findall("NaN|undefined|null|true|false|Infinity", "\n".join(map(str, shown)))

    @property
    def tokens(self):
        return self.page.get_by_role("option")

    @property
    def panel(self):
        return self.page.get_by_role("complementary", name="Details")
