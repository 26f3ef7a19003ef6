"""The Python of README.md and of the guide runs as it stands, on the model of the repository."""

import re
import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("page", ["README.md", "docs/python.md"])
def test_the_python_of_a_page_runs(page, tmp_path, monkeypatch):
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
    shutil.copytree(ROOT / "examples" / "tiny-lm", tmp_path / "examples" / "tiny-lm")
    monkeypatch.chdir(tmp_path)
    exec(compile("\n".join(blocks), page, "exec"), {})
    assert list(tmp_path.glob("*.knn"))


def test_the_links_of_the_pages_lead_somewhere():
    for page in [ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").glob("*.md")]:
        for link in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            assert link.startswith("https://") or (page.parent / link).exists(), f"{page.name}: {link}"
