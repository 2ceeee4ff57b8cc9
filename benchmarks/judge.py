"""A small classifier as a judge of images: which class, how sure, and where in its feature space.

Trained on the training split of a set, in two minutes on two cores; `Judge.accuracy` is that on the test split. Every
comparison puts real images through the same treatment as samples (the floor's noise, and Tweedie's formula after).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from scipy.linalg import sqrtm
from torch import Tensor, nn

from daebm.images import load_images

EPOCHS, BATCH, RATE = 4, 128, 2e-3
CONFIDENT = 0.9  # probability of the most likely class
CLASSES = 10
ROWS = 1000  # images per evaluation; bounds memory


@dataclass(eq=False)
class Judge:
    """Images (n, 1, 28, 28) in [-1, 1] in, probabilities or features out."""

    body: nn.Module
    head: nn.Linear
    accuracy: float = float("nan")

    def features(self, x: Tensor) -> Tensor:
        device = self.head.weight.device
        with torch.no_grad():
            return torch.cat([self.body(x[i : i + ROWS].to(device)) for i in range(0, len(x), ROWS)])

    def probabilities(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            return self.head(self.features(x)).softmax(1)


def train_judge(name: str, device: str = "cpu", seed: int = 0) -> Judge:
    """Adam with a rate that falls to zero; a shift by up to two pixels is all that is made up."""
    torch.manual_seed(seed)
    images, labels = (torch.from_numpy(part).to(device) for part in load_images(name, "train"))
    body = nn.Sequential(
        *(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(64 * 49, 64), nn.ReLU()),
    ).to(device)
    judge = Judge(body, nn.Linear(64, CLASSES).to(device))
    weights = [*body.parameters(), *judge.head.parameters()]
    optimiser = torch.optim.Adam(weights, RATE)
    steps = EPOCHS * (len(images) // BATCH)
    for step in range(steps):
        for group in optimiser.param_groups:
            group["lr"] = RATE * (1 - step / steps)
        rows = torch.randint(len(images), (BATCH,), device=device)
        x = unit(images[rows])
        across, down = torch.randint(-2, 3, (2,)).tolist()
        loss = F.cross_entropy(judge.head(body(x.roll((down, across), (2, 3)))), labels[rows])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    test, truth = load_images(name, "test")
    found = judge.probabilities(unit(torch.from_numpy(test))).argmax(1).cpu().numpy()
    judge.accuracy = float((found == truth).mean())
    return judge


def unit(images: Tensor) -> Tensor:
    """Bytes (n, h, w) as (n, 1, h, w) in [-1, 1]."""
    return images.unsqueeze(1).float() / 127.5 - 1


def shares(judge: Judge, x: Tensor) -> Tensor:
    return torch.bincount(judge.probabilities(x).argmax(1), minlength=CLASSES).double() / len(x)


def confident(judge: Judge, x: Tensor) -> float:
    return float((judge.probabilities(x).amax(1) >= CONFIDENT).double().mean())


def frechet(judge: Judge, x: Tensor, y: Tensor) -> float:
    """Distance of two Gaussians in feature space. It is biased upwards by few images: compare equal numbers only."""
    a, b = (judge.features(part).double().cpu().numpy() for part in (x, y))
    root = sqrtm(np.cov(a.T) @ np.cov(b.T)).real
    return float(np.square(a.mean(0) - b.mean(0)).sum() + np.trace(np.cov(a.T) + np.cov(b.T) - 2 * root))


def nearest(x: Tensor, train: Tensor) -> Tensor:
    """Distance of each image to the training image nearest to it: much less than a test image's is memory."""
    flat = train.flatten(1)
    return torch.cat([torch.cdist(x[i : i + 100].flatten(1), flat).amin(1) for i in range(0, len(x), 100)])
