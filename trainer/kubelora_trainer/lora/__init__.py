"""LoRA and DoRA adapter layers: initialisation, target modules and file formats."""
