"""Networks: the paper's sizes, one calling convention, and a default that starts as the data's Gaussian."""

import pytest
import torch

from daebm import Config, Ladder
from daebm.errors import InputError
from daebm.networks import DiffusedGaussian, GatedMLP, GaussianTop, LevelMLP, ReluBasis, ReluMLP, build


def parameters(network: torch.nn.Module) -> int:
    return sum(p.numel() for p in network.parameters())


def test_paper_networks_have_the_papers_size() -> None:
    assert parameters(ReluMLP(2, 128, 3)) == 33_537
    assert parameters(GatedMLP(2, 128, 3)) == 116_097


def test_relu_basis_is_the_sum_of_hinges() -> None:
    """The look-ups must equal U = (x/10)^2 + theta . (x - knots)_+ + c, in value and both gradients, off the knots."""
    basis = ReluBasis(3).double()
    x = torch.linspace(-5.03, 4.97, 301, dtype=torch.float64).unsqueeze(1).requires_grad_(True)
    t = torch.arange(301) % 3
    plain = (x / 10).square().squeeze(1) + ((x - basis.knots).clamp(min=0) * basis.theta[t]).sum(1) + basis.intercept[t]
    torch.testing.assert_close(basis(x, t), plain)
    ours = torch.autograd.grad(basis(x, t).sum(), [x, basis.theta])
    theirs = torch.autograd.grad(plain.sum(), [x, basis.theta])
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


def test_level_mlp_starts_as_the_diffused_gaussian() -> None:
    """With no squares the initial energy is -log N(x; m_t, C_t) at every level up to the dimension's constant."""
    generator = torch.Generator().manual_seed(0)
    data = torch.randn(500, 3, generator=generator) @ torch.randn(3, 3, generator=generator) + 1
    ladder = Ladder.geometric(3, floor=0.2)
    network = LevelMLP(data, ladder, width=16, hidden=2)
    x = torch.randn(50, 3, generator=generator)
    for t in range(ladder.levels):
        covariance = float(ladder.abar[t]) * torch.cov(data.T) + float(ladder.variance[t]) * torch.eye(3)
        normal = torch.distributions.MultivariateNormal(float(ladder.abar[t]) ** 0.5 * data.mean(0), covariance)
        expected = -normal.log_prob(x) - 1.5 * torch.log(torch.tensor(2 * torch.pi))
        torch.testing.assert_close(network(x, torch.full((50,), t)), expected, rtol=1e-4, atol=1e-4)  # float32


def test_few_rows_do_not_understate_the_spread() -> None:
    """Forty rows of thirty independent columns: fresh rows lie further out than these rows, but not by factors."""
    generator = torch.Generator().manual_seed(0)
    data, fresh = torch.randn(40, 30, generator=generator), torch.randn(2000, 30, generator=generator)
    base = DiffusedGaussian(data, Ladder.geometric(30, floor=0.05))
    level = torch.zeros(2000, dtype=torch.int64)
    # 15 in the mean of the true Gaussian; the covariance of the forty rows as it is gives 72.
    assert 12 < float(base.half_square(fresh, level).mean()) < 20
    plain = torch.linalg.inv(torch.cov(data.T) + 0.05**2 * torch.eye(30))
    away = fresh - data.mean(0)
    assert float((away @ plain * away).sum(1).mean() / 2) > 40


def test_carrying_keeps_the_whitened_coordinates_and_states_the_volume() -> None:
    """The log determinant of the map's Jacobian, by automatic differentiation, for every pair of levels."""
    generator = torch.Generator().manual_seed(0)
    data = torch.randn(500, 3, generator=generator) @ torch.randn(3, 3, generator=generator) + 1
    ladder = Ladder.geometric(3, floor=0.2, top=4)
    network = LevelMLP(data, ladder, width=16, hidden=1).double()
    x, labels = torch.randn(1, 3, generator=generator, dtype=torch.float64), torch.arange(5).unsqueeze(0)
    for t in range(5):
        level = torch.tensor([t])
        places, log_stretch = network.carried(x, level, labels)
        whitened = network.base.whiten(places.squeeze(0), labels.squeeze(0))
        near = {"rtol": 1e-5, "atol": 1e-5}  # the axes are float32
        torch.testing.assert_close(whitened, network.base.whiten(x, level).expand(5, 3), **near)
        torch.testing.assert_close(places[0, t], x[0], **near)

        def carried(y: torch.Tensor, level: torch.Tensor = level) -> torch.Tensor:
            return network.carried(y.unsqueeze(0), level, labels)[0].squeeze(0)

        jacobian = torch.autograd.functional.jacobian(carried, x.squeeze(0))
        torch.testing.assert_close(log_stretch.squeeze(0), torch.linalg.slogdet(jacobian).logabsdet, **near)


def test_level_mlp_takes_images_and_flat_directions() -> None:
    images = torch.zeros(20, 1, 4, 4)
    network = LevelMLP(images, Ladder.geometric(16), width=8, hidden=1, squares=2, octaves=1)
    assert torch.isfinite(network(images, torch.zeros(20, dtype=torch.long))).all()


def test_gaussian_top_is_standard_normal_at_level_t_only() -> None:
    network = GaussianTop(ReluMLP(2, 8, 1), top=3)
    x = torch.randn(4, 2)
    torch.testing.assert_close(network(x, torch.full((4,), 3)), x.square().sum(1) / 2)
    torch.testing.assert_close(network(x, torch.full((4,), 2)), network.inner(x, torch.full((4,), 2)))


@pytest.mark.parametrize("name", ["relu-basis", "relu-mlp", "gated-mlp"])
def test_wrong_event_shapes_are_refused(name: str) -> None:
    with pytest.raises(InputError, match=name):
        build(Config(network=name), torch.zeros(5, 2, 3), Ladder.geometric(6))
