"""Names that peft gives the factors of an adapter layer."""

from typing import Final

MAGNITUDE: Final = "lora_magnitude_vector"
"""peft's name for DoRA's factor: the norm of each output channel's weights."""
DOWN: Final = "lora_A"
"""peft's name for the down-projection."""
UP: Final = "lora_B"
"""peft's name for the up-projection."""
