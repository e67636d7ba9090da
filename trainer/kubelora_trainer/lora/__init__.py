"""The adapter: LoRA and DoRA layers, their initialisation, and the formats they are read from."""
