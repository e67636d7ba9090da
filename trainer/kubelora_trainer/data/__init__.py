"""The dataset: images, captions, buckets and the sampling order."""
