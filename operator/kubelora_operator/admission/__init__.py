"""Admission of a job: what its pods may ask for on this cluster."""
