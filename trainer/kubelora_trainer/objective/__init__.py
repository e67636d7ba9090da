"""The SDXL training loss and its inputs: latents, text embeddings and noise."""
