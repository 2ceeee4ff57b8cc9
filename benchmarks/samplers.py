"""How well the exact-start tests tell right from wrong: worst z of the samplers, weakest detection of each fault.

Runs the checks of tests/test_samplers.py over many seeds; there a limit of 5 counts as right, above 10 as caught.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
import test_samplers as checks

SEEDS, JOINT_SEEDS = range(100, 140), range(100, 112)


def main() -> None:
    kernels = {"MALA": checks.langevin.mala, **checks.KERNEL_FAULTS}
    for name, kernel in kernels.items():
        pick = max if name == "MALA" else min
        row = [pick(checks.exact_start(kernel, case, s).largest for s in SEEDS) for case in checks.cases().values()]
        print(f"{name:<28}" + "".join(f"{z:8.1f}" for z in row), flush=True)
    print("columns: " + ", ".join(checks.cases()))
    for name, move in checks.MOVES.items():
        outcomes = [checks.joint_exact_start(checks.by_transitions(move), s) for s in JOINT_SEEDS]
        print(f"MGMS, {name:<22}{max(max(o) for o in outcomes):8.1f}", flush=True)
    for name, advance in checks.LADDER_FAULTS.items():
        outcomes = [checks.joint_exact_start(advance, s) for s in JOINT_SEEDS]
        levels, positions = (min(part) for part in zip(*outcomes, strict=True))
        print(f"{name:<28}{levels:8.1f} level counts, {positions:.1f} positions", flush=True)


if __name__ == "__main__":
    main()
