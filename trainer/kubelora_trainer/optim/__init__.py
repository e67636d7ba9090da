"""Optimizers, flat buffers, learning rates, loss scaling and EMA."""
