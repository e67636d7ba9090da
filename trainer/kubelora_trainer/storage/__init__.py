"""The output directory, the record of a run, and URIs."""
