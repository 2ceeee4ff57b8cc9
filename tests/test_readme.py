"""What the README shows is run."""

import re
from pathlib import Path

import pytest
import torch

README = (Path(__file__).parent.parent / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_python_examples_run(capsys: pytest.CaptureFixture[str]) -> None:
    """All blocks in order, in one namespace, as a reader would paste them."""
    names: dict[str, object] = {}
    torch.manual_seed(0)
    said = []
    for block in BLOCKS:
        exec(compile(block, "README.md", "exec"), names)
        said.append(capsys.readouterr().out)
    energies = names["model"].energy(torch.tensor([[-2.0, 0.0], [2.0, 0.0], [0.0, 3.0]]))
    assert energies[0] < energies[1] < energies[2]
    # 500 draws from a share near .25 have a standard error of .02; a misaligned model is off by far more than .15.
    assert abs(float(said[0].split()[-1]) - 0.25) < 0.15
    assert "[ 1 -1]" in said[1]


def test_first_example_is_short() -> None:
    assert len([line for line in BLOCKS[0].splitlines() if line.strip() and not line.startswith("#")]) <= 15


def test_pictures_and_pages_exist() -> None:
    for target in re.findall(r"\]\(([^)]+)\)", README):
        assert (Path(__file__).parent.parent / target).exists(), target


@pytest.mark.parametrize("page", sorted(Path(__file__).parent.parent.glob("**/*.md")), ids=lambda p: p.name)
def test_no_page_has_an_unfilled_place(page: Path) -> None:
    assert ".venv" in page.parts or "@@" not in page.read_text()
