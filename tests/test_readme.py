"""What the README and the pages in docs show is run."""

import re
import shlex
from pathlib import Path

import numpy as np
import pytest
import torch

from test_cli import call

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
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


def test_commands_for_own_data_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Line by line, on a table like the one of the Python example."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    for name, n in (("table.csv", 300), ("new.csv", 50)):
        x = np.where(rng.random((n, 1)) < 0.75, [[-2, 0]], [[2, 0]]) + 0.5 * rng.standard_normal((n, 2))
        np.savetxt(name, x, delimiter=",", header="a,b", comments="")
    commands = [line for line in README.splitlines() if re.match(r"daebm (fit|(score|sample|inspect) model) ?", line)]
    assert [line.split()[1] for line in commands] == ["fit", "score", "sample", "inspect"]
    for line in commands:
        assert call(*shlex.split(line, comments=True)[1:]) == 0, line
    assert len((tmp_path / "scores.csv").read_text().splitlines()) == 51
    assert np.loadtxt("rows.csv", delimiter=",", skiprows=1).shape == (64, 2)
    assert (tmp_path / "model" / "report.html").exists()


@pytest.mark.long
def test_commands_for_the_shipped_model_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On few images, and without the ones that may not be at hand."""
    monkeypatch.chdir(tmp_path)
    lines = [line for line in README.splitlines() if re.match(r"daebm \w+ (--model )?fashion-mnist", line)]
    sample, score, inspect, ood = lines
    assert call(*shlex.split(sample, comments=True)[1:], "-n", "2") == 0
    assert (tmp_path / "garments.png").stat().st_size > 1000
    np.save("images.npy", np.random.default_rng(0).integers(256, size=(3, 28, 28)).astype(np.uint8))
    for line in (score, inspect):
        assert call(*shlex.split(line, comments=True)[1:]) == 0
    assert [row[-1] for row in (tmp_path / "scores.csv").read_text().splitlines()[1:]] == ["1"] * 3  # noise is flagged
    data = ROOT.parent / "shared" / "data"
    if data.is_dir():
        assert call(*shlex.split(ood, comments=True)[1:], "--images", "20", "--data-dir", str(data)) == 0


@pytest.mark.parametrize("page", ["thresholds.md", "tables.md"])
def test_python_examples_of_a_page_run(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, object] = {}
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / page).read_text(), re.DOTALL)
    assert len(blocks) >= 2
    for block in blocks:
        exec(compile(block, page, "exec"), names)
    said = capsys.readouterr().out
    if page == "thresholds.md":
        # What the page claims. 200 calibration rows and 500 fresh ones at .05: a share has an sd of .018.
        assert abs(float(re.search(r"([\d.]+)% of normal", said)[1]) - 5) < 7
        assert 40 <= int(re.search(r"(\d+) rows found", said)[1]) <= 90  # 50 there are, and up to a fifth false ones
        assert int(re.search(r"(\d+)% have", said)[1]) > 55
    else:
        assert "0.1 [ True  True  True  True  True False]" in said


def test_first_example_is_short() -> None:
    assert len([line for line in BLOCKS[0].splitlines() if line.strip() and not line.startswith("#")]) <= 15


def test_pictures_and_pages_exist() -> None:
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
            assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", sorted(Path(__file__).parent.parent.glob("**/*.md")), ids=lambda p: p.name)
def test_no_page_has_an_unfilled_place(page: Path) -> None:
    assert ".venv" in page.parts or "@@" not in page.read_text()
