"""Collect the parallel text of `translation.py` from installed packages: a base model's, and a client's.

    python benchmarks/parallel_text.py OUT [--root DIR] [--language de]
    python benchmarks/parallel_text.py --smoke

The base model's text are the messages of programs: gettext catalogs, ``*/de/LC_MESSAGES/*.mo``. The client's
is the help of LibreOffice (Debian's packages ``libreoffice-help-en-us`` and ``libreoffice-help-de``), whose
paragraphs have the same ids in every language; LibreOffice's own messages are left out of the base. Pages of
the help are split over store, dev and test by the hash of their names, so no page is in two splits. OUT gets
``base/train.jsonl`` and ``client/{store,dev,test}.jsonl``. Packages need not be installed: unpack them
(``dpkg-deb -x``) into DIR.
"""

import argparse
import gettext
import hashlib
import html
import json
import re
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path

_HELP = "usr/share/libreoffice/help"
_CLIENT = "libreoffice"
_PARAGRAPH = re.compile(r'<(h[1-6]|p) id="([^"]+)"[^>]*>(.*?)</\1>', re.DOTALL)
_TAG = re.compile(r"<[^<>]*>")
_WORDS = range(1, 41)
"""Words of a side that is used."""
_LONGER = 3.0
"""A side with this many times the characters of the other, and 20 more, is no translation of it."""


def clean(text: str) -> str:
    """Return a text without markup, marks of keyboard shortcuts, and repeated spaces."""
    text = html.unescape(_TAG.sub("", text)).replace("\N{ZERO WIDTH SPACE}", "")
    if len(text.split()) < 6 and text.count("_") == 1:
        text = text.replace("_", "")
    return " ".join(re.sub(r"&(?=\w)", "", text).split())


def is_pair(source: str, text: str) -> bool:
    """Check that two texts can be a source and its translation: of usable length, and not the same."""
    longest = _LONGER * min(len(source), len(text)) + 20
    return (
        source != text
        and len(source.split()) in _WORDS
        and len(text.split()) in _WORDS
        and max(len(source), len(text)) <= longest
        and sum(map(str.isalpha, source)) > len(source) // 2
    )


def read_catalogs(root: Path, language: str) -> Iterator[dict[str, str]]:
    """Yield the pairs of all gettext catalogs below a folder, each pair once.

    Args:
        root: the folder.
        language: the language of the translations.
    """
    seen = set()
    for path in sorted(root.rglob(f"{language}/LC_MESSAGES/*.mo")):
        if _CLIENT in str(path):
            continue
        with path.open("rb") as file:
            messages = gettext.GNUTranslations(file)._catalog  # type: ignore[attr-defined]
        for key, translated in messages.items():
            message = key[0] if isinstance(key, tuple) else key
            source, text = clean(message.rpartition("\4")[2]), clean(translated)
            if is_pair(source, text) and (source, text) not in seen:
                seen.add((source, text))
                yield {"id": f"{path.stem}-{len(seen)}", "source": source, "text": text}


def read_help(root: Path, language: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the pairs of LibreOffice's help: the name of the page, and a pair. The order of pages is random.

    Args:
        root: the folder into which the packages are unpacked.
        language: the language of the translations.
    """
    pages = (root / _HELP / "en-US" / "text").rglob("*.html")
    named = {str(page.relative_to(root / _HELP / "en-US")): page for page in pages}
    for name, page in sorted(named.items(), key=lambda item: compute_share(item[0])):
        translated = root / _HELP / language / name
        if not translated.exists():
            continue
        sources, texts = (
            {match[2]: clean(match[3]) for match in _PARAGRAPH.finditer(path.read_text("utf-8"))}
            for path in (page, translated)
        )
        for id in sorted(sources.keys() & texts.keys()):
            if is_pair(sources[id], texts[id]):
                yield name, {"id": f"{name}#{id}", "source": sources[id], "text": texts[id], "page": name}


def compute_share(page: str) -> float:
    """Return a number from 0 to 1 that is computed from the name of a page."""
    return int(hashlib.sha256(page.encode()).hexdigest()[:8], 16) / 16**8


def choose_split(page: str) -> str:
    """Return the split of a page: a tenth is dev, a tenth is test."""
    share = compute_share(page)
    return "test" if share < 0.1 else "dev" if share < 0.2 else "store"


def collect(root: Path, out: Path, language: str) -> None:
    """Write the pairs of the packages below `root` to `out`, and print how many there are."""
    parts: dict[str, list[dict[str, str]]] = {"client/store": [], "client/dev": [], "client/test": []}
    parts["base/train"] = list(read_catalogs(root, language))
    for page, pair in read_help(root, language):
        parts[f"client/{choose_split(page)}"].append(pair)
    for name, pairs in parts.items():
        path = out / f"{name}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(one, ensure_ascii=False) + "\n" for one in pairs), "utf-8")
        words = sum(len(one["text"].split()) for one in pairs)
        print(f"{path}: {len(pairs):,} pairs, {words:,} words of {language}")


def smoke(folder: Path) -> None:
    """Collect a catalog of two messages, one of them not translated, and 20 pages of help."""
    catalog = folder / "usr/share/locale/de/LC_MESSAGES/tool.mo"
    catalog.parent.mkdir(parents=True)
    messages = {"": "Content-Type: text/plain; charset=UTF-8\n", "Open": "Open", "menu\4_Close": "S&chließen"}
    strings = [
        text.encode() for side in (sorted(messages), map(messages.get, sorted(messages))) for text in side
    ]
    begun = 28 + 8 * len(strings)
    table = [
        (len(text), begun + sum(len(one) + 1 for one in strings[:at])) for at, text in enumerate(strings)
    ]
    head = struct.pack("<7I", 0x950412DE, 0, len(messages), 28, 28 + 8 * len(messages), 0, 0)
    entries = b"".join(struct.pack("<2I", *entry) for entry in table)
    catalog.write_bytes(head + entries + b"\0".join([*strings, b""]))
    for page in range(20):
        for language, text in (("en-US", "Press <b>Enter</b>."), ("de", "Dr&uuml;cken Sie <b>Enter</b>.")):
            path = folder / _HELP / language / "text" / f"{page}.html"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f'<p id="par_1" class="paragraph">{text}</p>', "utf-8")
    collect(folder, folder / "out", "de")
    [trained] = (folder / "out/base/train.jsonl").read_text("utf-8").splitlines()
    assert json.loads(trained) == {"id": "tool-1", "source": "Close", "text": "Schließen"}
    rows = [
        json.loads(line)
        for split in ("store", "dev", "test")
        for line in (folder / f"out/client/{split}.jsonl").read_text("utf-8").splitlines()
    ]
    assert {row["page"] for row in rows} == {f"text/{page}.html" for page in range(20)}
    assert {(row["source"], row["text"]) for row in rows} == {("Press Enter.", "Drücken Sie Enter.")}


def main() -> None:
    """Collect and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("--root", type=Path, default=Path("/"), help="into which packages are unpacked")
    parser.add_argument("--language", default="de")
    parser.add_argument("--smoke", action="store_true", help="text that is made up")
    options = parser.parse_args()
    if options.smoke:
        with tempfile.TemporaryDirectory() as folder:
            smoke(Path(folder))
    elif options.out is None:
        parser.error("name the folder to write to, or --smoke")
    else:
        collect(options.root, options.out, options.language)


if __name__ == "__main__":
    main()
