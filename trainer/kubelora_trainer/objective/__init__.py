"""The SDXL training loss and what it reads: latents, text embeddings and noise."""
