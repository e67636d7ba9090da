"""Measurements of gradients and updates, taken on the device."""
