"""The SDXL base model: loading, checking, key mapping; the tiny models of tests and demos."""
