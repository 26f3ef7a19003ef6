"""Keys see a store without what is forbidden: generated requests to both, compared byte for byte."""

import math
import random
import re
import shutil
import sys
from dataclasses import dataclass
from typing import Any

import pytest
import sqlalchemy

import knnstore
from knnstore import KNNSettings, Selection
from knnstore.lm import CacheSettings, save_settings

WORDS = ["harbour", "council", "storm", "wall", "grain", "boat", "winter", "prices", "morning", "quiet"]
DOMAINS = ["letters", "news", "law", "own"]
TAGS = ["sea", "old", "hidden"]
VOLATILE = re.compile(rb'("(?:id|created|added_at)": ?)("(?:cmpl-|chatcmpl-|20)[^"]*"|\d+)')
PLAIN = ["/metrics", "/openapi.json", "/tokenizer_info", "/health", "/v1/models", "/v1", "/v1/keys"]
KEYS: list[tuple[tuple[str, ...], list[str]]] = [
    (("predict", "read"), ["letters"]),
    (("predict", "read"), ["letters", "law"]),
    (("predict", "read", "write"), ["own"]),
    (("admin",), ["news"]),
    (("predict", "read"), ["nothing yet"]),
]


def documents(domain: str) -> list[dict[str, Any]]:
    """Its documents; ids, tags and words are found in other domains too."""
    drawn = random.Random(domain)
    return [
        {
            "id": f"d{number}",
            "text": f"The {domain} said: {' '.join(drawn.choices(WORDS, k=12))}.",
            "n": number,
        }
        for number in range(drawn.randint(2, 5))
    ]


@dataclass
class Pair:
    """A key of the whole store, and the same of a store that has nothing else."""

    whole: Any
    key: str
    alone: Any
    key_alone: str
    writes: bool

    def differ(self, method: str, path: str, options: dict[str, Any]) -> str:
        """How the two answers differ, empty if in nothing; what is another each time does not count."""
        one, other = (
            (answer.status_code, seen_headers(answer), VOLATILE.sub(rb"\1", answer.content))
            for answer in (
                self.whole.call(method, path, self.key, **options),
                self.alone.call(method, path, self.key_alone, **options),
            )
        )
        assert one[0] < 500, one
        self.status = one[0]
        alike = one == other or (self.writes and one[0] == other[0] and nearly_equal(one[2], other[2]))
        return "" if alike else f"{method} {path} {options}\n{one}\n{other}"


def nearly_equal(one: bytes, other: bytes) -> bool:
    """Return True if two answers differ only by rounding and by the order of the texts in a stream.

    Segments of a domain that is written to are merged earlier where a store has many others. vLLM generates
    the texts of a request one beside the other.
    """
    bodies = [b"\n\n".join(sorted(body.split(b"\n\n"), key=text_of_event)) for body in (one, other)]
    parts = [re.split(rb"(-?\d+\.\d+(?:e-\d+)?)", body) for body in bodies]  # odd ones are numbers
    if parts[0][::2] != parts[1][::2]:
        return False
    numbers = zip(*(part[1::2] for part in parts), strict=True)
    return all(abs(float(number) - float(another)) < 1e-4 for number, another in numbers)


def text_of_event(event: bytes) -> int:
    """Return the number of the text that an event of a stream continues; a large number for the end."""
    index = re.search(rb'^data: .*?"index": (\d+)', event)
    return int(index[1]) if index else sys.maxsize


def seen_headers(answer) -> dict[str, str]:
    return {name: value for name, value in answer.headers.items() if name != "x-request-id"}


@pytest.fixture(scope="module")
def pairs(inside, model_path, tmp_path_factory) -> list[Pair]:
    """A server of all domains, and for each key one of its domains alone."""

    def server(name: str, domains: list[str]):
        home = tmp_path_factory.mktemp(name) / "home"
        lm = knnstore.create(home, str(model_path))
        with lm.store:
            for domain in reversed(domains):  # the first settings of the whole store are of forbidden text
                lm.add(documents(domain), domain=domain, tags=[TAGS[len(domain) % 3], "sea"])
        return inside(home)

    whole = server("whole", DOMAINS)
    found = []
    for number, (rights, domains) in enumerate(KEYS):
        alone = server(f"alone{number}", [one for one in DOMAINS if one in domains])
        keys = (one.key(*rights, domains=domains) for one in (whole, alone))
        writes = bool({"write", "admin"} & {*rights})
        found.append(Pair(whole, next(keys), alone, next(keys), writes))
    return found


class Requests:
    """Requests of every kind, also malformed ones, drawn at random."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)

    def one(self) -> tuple[str, str, dict[str, Any]]:
        """Method, path and what goes with it."""
        make = self.draw.choices(
            [
                self._completion,
                self._chat,
                self._explain,
                self._model,
                self._documents,
                self._change,
                self._plain,
            ],
            [8, 1, 2, 3, 4, 3, 3],
        )[0]
        method, path, options = make()
        if "json" in options and self.draw.random() < 0.25:
            options = self._broken(options["json"])
        return method, path, options

    def _name(self) -> str:
        return self.draw.choice([*DOMAINS, *DOMAINS, "nothing yet", "x", "LAW", "law%", "", "\0", "a" * 700])

    def _model_name(self) -> str:
        parts = self.draw.choices(
            [*DOMAINS, "nothing yet", "x", "%2B", ""], k=self.draw.choice([0, 1, 1, 1, 2, 3])
        )
        return "+".join([self.draw.choice(["tiny"] * 9 + ["tin"]), *parts])

    def _text(self) -> str:
        return " ".join(self.draw.choices(["The", "said", *DOMAINS, *WORDS], k=self.draw.randint(1, 6)))

    def _maybe(self, share: float, **more: Any) -> dict[str, Any]:
        return more if self.draw.random() < share else {}

    def _knn(self) -> dict[str, Any]:
        draw = self.draw
        return {
            **self._maybe(0.4, domains=[self._name() for _ in range(draw.randint(1, 2))]),
            **self._maybe(0.3, tags=draw.sample(TAGS, draw.randint(1, 2))),
            **self._maybe(0.3, where=draw.choice(["n > 1", "n = 0", "n < 99", "m = 1", "n >", "id = 'd1'"])),
            **self._maybe(0.4, lam=draw.random()),
            **self._maybe(0.3, k=draw.choice([1, 2, 9, 1000])),
            **self._maybe(0.4, sources=draw.randint(0, 3)),
        }

    def _completion(self):
        draw = self.draw
        body = {
            "model": self._model_name(), "prompt": self._text(), "max_tokens": draw.randint(0, 3),
            "seed": draw.randint(0, 9), **self._maybe(0.5, temperature=0),
            **self._maybe(0.5, logprobs=draw.randint(0, 5)), **self._maybe(0.4, echo=True),
            **self._maybe(0.2, n=2), **self._maybe(0.2, stream=True), **self._maybe(0.6, knn=self._knn()),
        }  # fmt: skip
        return "POST", "/v1/completions", {"json": body}

    def _chat(self):
        messages = [{"role": "user", "content": self._text()}]
        return "POST", "/v1/chat/completions", {"json": {"model": self._model_name(), "messages": messages}}

    def _explain(self):
        body = {"model": self._model_name(), "text": self._text(), "neighbors": self.draw.randint(0, 4)}
        return "POST", "/v1/explain", {"json": {**body, **self._maybe(0.5, knn=self._knn())}}

    def _model(self):
        return "GET", self.draw.choice(["/v1/models", f"/v1/models/{self._model_name()}"]), {}

    def _documents(self):
        draw = self.draw
        asked = {
            **self._maybe(0.5, domain=self._name()), **self._maybe(0.3, id=f"d{draw.randint(0, 5)}"),
            **self._maybe(0.3, tag=draw.choice(TAGS)), **self._maybe(0.5, text=True),
            **self._maybe(0.3, limit=draw.randint(-1, 3)), **self._maybe(0.3, offset=draw.randint(-1, 4)),
        }  # fmt: skip
        return "GET", draw.choice(["/v1/documents", "/v1/documents", "/v1/domains"]), {"params": asked}

    def _change(self):
        draw = self.draw
        if draw.random() < 0.5:
            path = draw.choice(["/v1/documents"] * 4 + ["/v1/domains"])
            domain = self._name() if path == "/v1/documents" else draw.choice(["law", "letters", "x"])
            return "DELETE", path, {"params": {"domain": domain, "id": f"d{draw.randint(0, 5)}"}}
        new = [{"id": f"d{draw.randint(0, 5)}", "text": self._text()} for _ in range(draw.randint(1, 2))]
        return "POST", "/v1/documents", {"json": {"domain": self._name(), "documents": new}}

    def _plain(self):
        draw = self.draw
        path = draw.choice([*PLAIN, f"/v1/domains/{self._name()}".replace("\0", "%00")])
        if draw.random() < 0.3:
            return "POST", "/tokenize", {"json": {"prompt": self._text()}}
        return draw.choice(["GET", "GET", "GET", "PUT", "DELETE", "HEAD"]), path, {}

    def _broken(self, body: dict[str, Any]) -> dict[str, Any]:
        """A body that is wrong somewhere."""
        draw = self.draw
        if draw.random() < 0.3:
            whole = str(body).replace("'", '"').encode()
            return {
                "content": whole[: draw.randint(0, len(whole))],
                "headers": {"Content-Type": "application/json"},
            }
        junk = [
            None,
            -1,
            1e308,
            "",
            [],
            {},
            [[]],
            "\ud800".encode("utf-8", "surrogatepass").decode("latin-1"),
            True,
            [0] * 500,
        ]
        name = draw.choice([*body, "more", "knn"])
        return {"json": {**body, name: draw.choice(junk)}}


def ask(pairs: list[Pair], seed: int, count: int) -> set[int]:
    """Send so many requests to each side; the statuses that came."""
    requests, draw, statuses = Requests(seed), random.Random(-1 - seed), set()
    for _ in range(count):
        pair = draw.choice(pairs)
        difference = pair.differ(*requests.one())
        assert not difference, difference
        statuses.add(pair.status)
    return statuses


def test_answers_are_those_of_a_store_without_the_rest(pairs):
    for pair in pairs:
        for path in PLAIN:
            difference = pair.differ("GET", path, {})
            assert not difference, difference
    assert ask(pairs, 0, 80) >= {200, 400, 403, 404}


@pytest.mark.slow
@pytest.mark.parametrize(
    "count", [1000, *(pytest.param(count, marks=pytest.mark.exhaustive) for count in range(2000, 2005))]
)
def test_ten_thousand_answers_are_those_of_a_store_without_the_rest(pairs, count):
    assert ask(pairs, count, count) >= {200, 400, 403, 404}


def test_what_is_forbidden_takes_the_work_of_what_is_not_there(pairs):
    """The same statements to the database, and nothing for the engine: so no clock tells them apart."""
    pair, work = pairs[2], []

    def executed(_connection, _cursor, statement, _parameters, _context, _many) -> None:
        work.append(statement)

    def done(method: str, path: str, options: dict[str, Any]) -> tuple[int, list[str]]:
        work.clear()
        answer = pair.whole.call(method, path, pair.key, **options)
        return answer.status_code, [*work]

    called = pair.whole.serving.engine.call
    pair.whole.serving.engine.call = lambda job: (work.append("engine"), called(job))[1]
    sqlalchemy.event.listen(sqlalchemy.Engine, "before_cursor_execute", executed)
    try:
        for asked in (
            lambda name: ("POST", "/v1/completions", {"json": {"model": f"tiny+{name}", "prompt": "a"}}),
            lambda name: ("POST", "/v1/explain", {"json": {"model": f"tiny+{name}", "text": "a"}}),
            lambda name: ("GET", f"/v1/models/tiny+{name}", {}),
            lambda name: ("GET", "/v1/documents", {"params": {"domain": name, "text": True}}),
            lambda name: ("DELETE", "/v1/documents", {"params": {"domain": name, "id": "d0"}}),
            lambda name: ("DELETE", "/v1/domains", {"params": {"domain": name}}),
            lambda name: (
                "POST",
                "/v1/documents",
                {"json": {"domain": name, "documents": [{"id": "a", "text": "b"}]}},
            ),
        ):
            done(*asked("unknown"))  # whoever comes first after a commit looks at the revision
            forbidden, unknown = done(*asked("letters")), done(*asked("unknown"))
            assert forbidden == unknown
            assert forbidden[0] in (200, 404)
            assert "engine" not in forbidden[1]
    finally:
        sqlalchemy.event.remove(sqlalchemy.Engine, "before_cursor_execute", executed)
        pair.whole.serving.engine.call = called


def test_named_sources_are_of_what_writes(inside, prepared, tmp_path_factory):
    """Settings that count in scoring alone give no token of a written text, and are no source of one."""
    home = shutil.copytree(prepared, tmp_path_factory.mktemp("sources") / "home")
    lm = knnstore.load(home, "a")
    selection = Selection(domains=("news",))
    with lm.store:
        settings = KNNSettings(
            k=8, lam=0.5, temperature=30.0, selection=selection, scoring_only=("cache",),
            cache=CacheSettings(size=20, temperature=20.0, lam=0.9),
        )  # fmt: skip
        save_settings(lm.store, settings)
    server = inside(home)
    key = server.key("predict", "read")
    asked = {"model": "tiny+news", "prompt": "The harbour, the harbour", "max_tokens": 5, "temperature": 0}
    asked |= {"logprobs": 0, "knn": {"sources": 3}}
    choice = server.call("POST", "/v1/completions", key, json=asked).json()["choices"][0]
    named = choice["knn"]["sources"]
    written = [math.exp(one) for one in choice["logprobs"]["token_logprobs"]]
    assert [one["p"] for one in named] == pytest.approx(written, abs=1e-5)
    body = {"model": "tiny+news", "after": asked["prompt"], "text": choice["text"], "neighbors": 3}
    scored = server.call("POST", "/v1/explain", key, json=body).json()["data"]
    assert max(abs(one["p"] - other["p"]) for one, other in zip(named, scored, strict=True)) > 0.01
