"""Time without a device: what a compiler's own estimate and the bytes that a program moves say. All of it is modelled, and good for
ratios: of two programs for one chip, not of a program and a clock on a wall."""
