"""Muon: what a step keeps of a momentum, how far it goes, and which weights it moves."""

import pytest
import torch
from torch import Tensor, nn

from daebm import Dataset, InputError, networks, state
from daebm.config import Config
from daebm.ladder import Ladder
from daebm.muon import Muon, orthogonal
from daebm.training import begin


def of_condition(rows: int, columns: int, least: float, seed: int) -> Tensor:
    """A matrix with singular values from 1 down to ``least``."""
    generator = torch.Generator().manual_seed(seed)
    p, _s, q = torch.linalg.svd(torch.randn(rows, columns, generator=generator), full_matrices=False)
    return p * torch.logspace(0, torch.tensor(least).log10(), min(rows, columns)) @ q


@pytest.mark.parametrize("shape", [(8, 8), (6, 40), (40, 6), (1, 5)], ids=str)
@pytest.mark.parametrize("scale", [1e-35, 1.0, 1e35], ids=str)
def test_a_step_keeps_the_directions_alone(shape: tuple[int, int], scale: float) -> None:
    """P Q' of P S Q': same singular vectors, values that the polynomial leaves between .7 and 1.2.

    Its slope at 0 is 3.44, so that five rounds lift everything from 1 / 3.44^5 of the norm on, here from .005 of 1.
    """
    matrices = torch.stack([of_condition(*shape, 0.005 * 40**0.5, seed) * scale for seed in range(3)])
    for given, found in zip(matrices, orthogonal(matrices), strict=True):
        p, _s, q = torch.linalg.svd(given, full_matrices=False)
        inner = p.T @ found @ q.T
        values = inner.diagonal()
        assert float(values.min()) > 0.6 and float(values.max()) < 1.3
        # Products of matrices of norm 1 in float32, five rounds of them, divided by as little as the least value.
        assert float((inner - values.diag()).abs().max()) < 1e-3


def test_nothing_is_made_of_nothing() -> None:
    assert not orthogonal(torch.zeros(2, 3, 4)).any()


def network() -> nn.Module:
    data = torch.randn(50, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    ladder = Ladder.geometric(64, floor=0.2, top=4)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return networks.build(Config(network="level-resnet", width=4, hidden=1), data, ladder)


def slopes(weights: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for weight in weights.parameters():
        weight.grad = torch.randn(weight.shape, generator=generator).to(weight)


def stepped(optimiser: str, rate: float = 0.01, steps: int = 2) -> tuple[nn.Module, dict[str, Tensor]]:
    """A network after some steps of noise, and how far each weight was moved by the last of them."""
    it = network()
    config = Config(network="level-resnet", optimiser=optimiser, learning_rate=rate)
    moving = state.optimiser(config, it, warm_start=True)
    for group in moving.param_groups:
        group["lr"] = rate * group["factor"]
    for seed in range(steps):
        slopes(it, seed)
        before = {name: weight.detach().clone() for name, weight in it.named_parameters()}
        moving.step()
    assert all(weight.grad is not None for weight in it.parameters())  # what bounds an update reads them afterwards
    return it, {name: weight.detach() - before[name] for name, weight in it.named_parameters()}


def test_convolutions_are_moved_by_muon_and_all_else_by_adam() -> None:
    (_, by_adam), (_, by_muon) = stepped("adam"), stepped("muon")
    convolutions = {name for name, move in by_adam.items() if move.ndim == state.CONVOLUTION}
    assert convolutions and any("stem" in name for name in convolutions)
    for name, move in by_muon.items():
        assert torch.equal(move, by_adam[name]) == (name not in convolutions), name


def test_the_rate_is_the_norm_of_a_step() -> None:
    """Up to the polynomial's .7 to 1.2, and to sqrt(rows / columns) where a matrix has more rows than columns."""
    rate = 0.01
    for name, move in stepped("muon", rate)[1].items():
        if move.ndim == state.CONVOLUTION:
            flat = move.flatten(1)
            values = torch.linalg.svdvals(flat) / (rate * state.MUON_FACTOR)
            values /= max(1.0, flat.shape[0] / flat.shape[1]) ** 0.5
            assert float(values.min()) > 0.5 and float(values.max()) < 1.3, name


def test_a_step_follows_nesterovs_momentum() -> None:
    weight = nn.Parameter(torch.zeros(3, 5))
    given = [torch.randn(3, 5, generator=torch.Generator().manual_seed(k)) for k in range(3)]
    moving = Muon([{"params": [weight], "matrices": True}], lr=0.1, betas=(0.8, 0.999))
    momentum = torch.zeros(3, 5)
    for slope in given:
        before, weight.grad = weight.detach().clone(), slope
        moving.step()
        momentum = 0.8 * momentum + 0.2 * slope
        ahead = 0.8 * momentum + 0.2 * slope
        expected = -0.1 * orthogonal(ahead[None])[0]
        torch.testing.assert_close(weight.detach() - before, expected, rtol=1e-4, atol=1e-6)


def test_chains_are_learned_from_by_adam() -> None:
    groups = state.optimiser(Config(network="level-resnet", optimiser="muon"), network()).param_groups
    assert not any(group.get("matrices") for group in groups)


def test_muon_without_convolutions_to_move_is_refused() -> None:
    data = Dataset.standardised("images", torch.randn(60, 1, 8, 8), torch.randn(10, 1, 8, 8))
    fine = {"optimiser": "muon", "network": "level-resnet", "width": 4, "hidden": 1, "floor": 0.2, "batch": 10}
    assert isinstance(begin(Config(denoise=5, **fine), data).state.optimiser, Muon)
    for changes in ({}, {"denoise": 5, "network": "level-mlp"}):
        with pytest.raises(InputError, match="optimiser=muon moves the convolutions of a warm start"):
            begin(Config(**(fine | changes)), data)


def test_a_weight_without_a_slope_stays() -> None:
    weight = nn.Parameter(torch.ones(2, 3))
    moving = Muon([{"params": [weight], "matrices": True}], lr=0.1)
    moving.step()
    assert torch.equal(weight, torch.ones(2, 3)) and not moving.state
