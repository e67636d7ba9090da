"""The dataset: images, captions, buckets and the order of samples."""
