"""Ways to damage a home: by chance, and one after the other."""

import json
import os
import random
import re
import sqlite3
from hashlib import sha256
from pathlib import Path
from typing import Any

ODD = [
    "", "\0", "\x1b]52;c;aGk=\x07", "\u202e", "\udcff", "../../etc", "/", "a" * 100_000, "[" * 5000, "null",
    "{}", b"", b"\xff\xfe\x00", bytes(1000), -1, 0, 1, 2**31, 2**63 - 1, -(2**63), 1e308, -1e-320, None,
    '{"a":' * 3000 + "1" + "}" * 3000, "[1]", "NaN", "2026-99-99 00:00:00.000000", "live",
    "http://127.0.0.1:9",
]  # fmt: skip
JSON_ODD = [
    "", "\0", "\udcff", "../..", -1, 0, 1.5, 2**70, None, [], {}, [[]], True, "a" * 10_000, {"a": {"b": []}},
    float("inf"),
]  # fmt: skip
DAMAGES = ("missing", "emptied", "short", "flipped", "exchanged", "a folder", "a pipe")
_NAMED = re.compile(r"[0-9a-f-]{36}|[0-9a-f]{64}|\d{8}|[a-z0-9]{24}(?=-)")  # one of many of a kind
_EVERYWHERE = re.compile(r"[^/]+$|weights/|keys/(manifest|owner|writer|segments)")


def mutate(home: Path, rng: random.Random) -> str:
    """Change one thing; returns what."""
    kind = rng.choice(["file"] * 5 + ["catalog page"] * 2 + ["row"] * 4 + ["json"] * 2)
    if kind == "row":
        return row(home / "catalog.db", rng)
    if kind == "json":
        return description(rng.choice(sorted(path for path in home.rglob("*.json") if path.is_file())), rng)
    files = sorted(path for path in home.rglob("*") if path.is_file() and not path.name.endswith(".lock"))
    path = home / "catalog.db" if kind == "catalog page" else rng.choice(files)
    content = bytearray(path.read_bytes())
    size = len(content)
    at = rng.randrange(size) if size else 0
    if size and rng.random() < 0.3:
        at = min(at, rng.randrange(128))  # headers
    how = rng.choice(
        ["bit", "bit", "truncated", "extended", "zeroed", "random", "exchanged", "emptied", "removed"]
    )
    if how == "bit" and size:
        content[at] ^= 1 << rng.randrange(8)
    elif how == "truncated":
        del content[at:]
    elif how == "extended":
        content += rng.randbytes(rng.choice([1, 512, 4096]))
    elif how in ("zeroed", "random"):
        end = min(size, at + rng.choice([1, 8, 64, 4096]))
        content[at:end] = bytes(end - at) if how == "zeroed" else rng.randbytes(end - at)
    elif how == "exchanged":
        content[:] = rng.choice(files).read_bytes()
    elif how == "emptied":
        content.clear()
    if how == "removed":
        path.unlink()
    else:
        path.write_bytes(content)
    return f"{path.relative_to(home)} {how} at {at} of {size}"


def row(catalog: Path, rng: random.Random) -> str:
    """Change a value of the catalog."""
    with sqlite3.connect(catalog) as connection:
        connection.execute("PRAGMA ignore_check_constraints=ON")
        tables = [
            name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
        ]
        table = rng.choice(sorted(name for name in tables if name.startswith("knnstore")))
        columns = [name for _, name, *_ in connection.execute(f"PRAGMA table_info({table})")]
        column = rng.choice(columns)
        rows = [number for (number,) in connection.execute(f"SELECT rowid FROM {table} ORDER BY rowid")]
        value = rng.choice(ODD)
        if rows:
            try:
                chosen = rng.choice(rows)
                old = connection.execute(
                    f"SELECT {column} FROM {table} WHERE rowid = ?", [chosen]
                ).fetchone()[0]
                if rng.random() < 0.4 and isinstance(old, int):
                    value = old + rng.choice([-1, 1, 2, 100, -1000])
                elif rng.random() < 0.4 and isinstance(old, bytes) and old:
                    at = rng.randrange(len(old))
                    value = old[:at] + bytes([old[at] ^ 1 << rng.randrange(8)]) + old[at + 1 :]
                elif rng.random() < 0.3 and isinstance(old, str) and old[:1] in "[{" and old:
                    value = json.dumps(changed(json.loads(old), rng))
                connection.execute(f"UPDATE {table} SET {column} = ? WHERE rowid = ?", [value, chosen])
            except (sqlite3.Error, UnicodeEncodeError, OverflowError):
                return "nothing"
    connection.close()
    return f"{table}.{column} = {value!r:.60}"


def description(path: Path, rng: random.Random) -> str:
    """Change a value of a JSON file, and the checksum that covers it."""
    try:
        content = json.loads(path.read_bytes())
    except ValueError:
        return "nothing"
    if isinstance(content, dict) and "sha256" in content and "content" in content:
        inner = changed(content["content"], rng)
        text = json.dumps(inner, sort_keys=True, separators=(",", ":"))
        path.write_text(f'{{"sha256":"{sha256(text.encode()).hexdigest()}","content":{text}}}')
    else:
        path.write_text(json.dumps(changed(content, rng)))
    return f"{path.name} changed"


def changed(value: Any, rng: random.Random) -> Any:
    """Change one part of a JSON value."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        name = rng.choice(sorted(value))
        if rng.random() < 0.1:
            return {key: part for key, part in value.items() if key != name}
        return {**value, name: changed(value[name], rng)}
    if isinstance(value, list) and value and rng.random() < 0.9:
        at = rng.randrange(len(value))
        return [*value[:at], changed(value[at], rng), *value[at + 1 :]]
    if isinstance(value, int) and not isinstance(value, bool) and rng.random() < 0.5:
        return value + rng.choice([-1, 1, 7, 1000, -1000])
    return rng.choice(JSON_ODD)


# -- one after the other


def grid(home: Path, engine: str) -> list[tuple[Path, str]]:
    """Every damage to a file of every kind; paths are relative to the home.

    What every home has is damaged in that of "exact" alone, and the copy of a move nowhere: it is not read.
    """
    kinds: dict[str, Path] = {}
    for path in _files(home):
        kind = _kind(path, home)
        if not kind.startswith("half/") and (engine == "exact" or not _EVERYWHERE.match(kind)):
            kinds.setdefault(kind, path.relative_to(home))
    return [(path, how) for path in kinds.values() for how in DAMAGES]


def damage(home: Path, path: Path, how: str) -> str:
    """Damage a file in one of the ways of `DAMAGES`; returns what was done."""
    content = path.read_bytes()
    if how in ("missing", "a folder", "a pipe"):
        path.unlink()
    if how == "a folder":
        path.mkdir()
    elif how == "a pipe":
        os.mkfifo(path)
    elif how == "emptied":
        path.write_bytes(b"")
    elif how == "short":
        path.write_bytes(content[:-1])
    elif how == "flipped" and content:
        used = [at for at, byte in enumerate(content[:4096]) if byte] or [0]
        at = used[len(used) // 2]
        path.write_bytes(content[:at] + bytes([content[at] ^ 2]) + content[at + 1 :])
    elif how == "exchanged":
        kind = _kind(path, home)
        others = [other for other in _files(home) if other.read_bytes() != content]
        alike = [other for other in others if _kind(other, home) == kind]
        alike += [other for other in others if other.suffix == path.suffix]
        if not alike:
            return "nothing"
        path.write_bytes(alike[0].read_bytes())
        alike[0].write_bytes(content)
    return f"{path.relative_to(home)} {how}"


def _kind(path: Path, home: Path) -> str:
    return _NAMED.sub("*", str(path.relative_to(home)))


def _files(home: Path) -> list[Path]:
    return sorted(path for path in home.rglob("*") if path.is_file())
