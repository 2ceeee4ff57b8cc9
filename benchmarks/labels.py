"""How fast do labels travel over the ladder of a trained model, for so many steps a burst and labels a block?

`python benchmarks/labels.py [--model fashion-mnist --steps 3 --block 4 --transitions 60 --chains 100 --device cpu]`
starts chains as diffused held-out images at all levels and shows the mean squared distance of a label from itself so
many transitions before, from the middle of the ladder (.2 to .8), where its ends are not felt. Of a label that
diffuses it grows by twice its diffusivity D a transition, and a round trip takes T^2 / D. Figures of 100 chains over 60
transitions are good to a tenth. Some five minutes on one core.
"""

from __future__ import annotations

import argparse

import torch

from daebm import load
from daebm.data import to_unit_range
from daebm.experiments.images import HELD_OUT
from daebm.images import load_images
from daebm.samplers import mgms
from daebm.samplers.langevin import KERNELS

LAGS = (1, 2, 4, 8, 15, 30, 45)
MIDDLE = (0.2, 0.8)  # of the ladder


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="fashion-mnist")
    parser.add_argument("--steps", type=int, help="the model's own where it is not given")
    parser.add_argument("--block", type=int, help="likewise")
    parser.add_argument("--transitions", type=int, default=60)
    parser.add_argument("--chains", type=int, default=100)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    model, generator = load(args.model).to(args.device), torch.Generator(args.device).manual_seed(0)
    steps, block = args.steps or model.config.steps, args.block or model.config.block
    images, _labels = load_images(model.config.experiment, "train")
    held_out = torch.from_numpy(images[-HELD_OUT:][: args.chains]).reshape(-1, *model.event)
    z = model.standardise(to_unit_range(held_out.to(args.device)))
    t = torch.randint(model.ladder.levels, (len(z),), generator=generator, device=z.device)
    x = model.ladder.diffuse(z, t, generator)
    move = mgms.label_move(model.config.label_move, model.ladder.top, block)
    seen, accepted = [t], []
    for _ in range(args.transitions):
        x, t, info = mgms.transition(KERNELS["mala"], model.network, x, t, model.sigma, steps, move, generator)
        seen.append(t)
        accepted.append(float(info.steps.accept_prob.mean()))
    way = torch.stack(seen).double() / model.ladder.top
    found = []
    for lag in (lag for lag in LAGS if lag <= 0.8 * args.transitions):
        before, after = way[:-lag], way[lag:]
        middle = (before > MIDDLE[0]) & (before < MIDDLE[1])
        found.append(f"{lag}: {float((after - before)[middle].square().mean()) * model.ladder.top**2:.1f}")
    acceptance = sum(accepted) / len(accepted)
    print(f"{steps} steps, block of {block}, acceptance {acceptance:.2f}:", ", ".join(found))


if __name__ == "__main__":
    main()
