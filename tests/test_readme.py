"""The code of the README and of the pages in docs runs as printed, and does what the text around it says."""

import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", README, re.S | re.M)


PAGES = {
    f"{page.name}-{number}": block
    for page in sorted((ROOT / "docs").glob("*.md"))
    for number, block in enumerate(re.findall(r"^```python\n(.*?)^```", page.read_text(), re.S | re.M))
}


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    # The same result on every machine; the GPU has its own tests.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.splitlines()[1])
def test_every_python_block_runs(block: str) -> None:
    exec(compile(block, "README.md", "exec"), {"__name__": "readme"})


@pytest.mark.parametrize("block", PAGES.values(), ids=PAGES)
def test_every_python_block_of_the_pages_runs(block: str) -> None:
    exec(compile(block, "<docs>", "exec"), {"__name__": "docs"})


def test_the_first_block_writes_what_the_text_below_it_says() -> None:
    names: dict[str, object] = {"__name__": "readme"}
    exec(compile(BLOCKS[0], "README.md", "exec"), names)
    pool = names["pool"]
    assert isinstance(pool, torch.Tensor)
    expected = torch.full_like(pool, -1)
    expected[3, :3] = torch.tensor([11, 12, 13])
    expected[7, 128] = 21
    assert torch.equal(pool, expected)


def test_the_first_screen_shows_what_it_is_and_code_that_runs() -> None:
    first_screen = "\n".join(README.splitlines()[:30])
    assert first_screen.count("```") == 2


@pytest.mark.parametrize("link", re.findall(r"\]\(([^)#:]+)\)", README))
def test_links_lead_to_files(link: str) -> None:
    assert (ROOT / link).is_file()
