"""Trains a LoRA adapter for SDXL, measures it and exports it; knows nothing of the cluster."""
