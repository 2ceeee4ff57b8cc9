"""Exact samplers: Langevin kernels for one energy, MGMS for a ladder of them, step sizes per level."""
