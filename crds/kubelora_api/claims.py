"""Claims named in a job's URIs: mounted by the operator, or given with ``--mount``."""

from collections.abc import Iterator

from kubelora_api.spec import JobSpec
from kubelora_api.uri import parse_place


def inputs_of(spec: JobSpec) -> Iterator[tuple[str, str]]:
    """Yield every URI that the job reads, with its field below ``spec``."""
    found = {
        "model.uri": spec.model.uri,
        "model.vae": spec.model.vae,
        "model.config": spec.model.config,
        "dataset.uri": spec.dataset.uri,
        "adapter.from": spec.adapter.from_,
        "health.baseline": spec.health.baseline,
    }
    yield from ((field, uri) for field, uri in found.items() if uri)
    for index, source in enumerate(spec.dataset.extra_sources):
        yield f"dataset.extraSources[{index}].uri", source.uri


def claims_of(spec: JobSpec) -> dict[str, bool]:
    """Return the claims by name, and whether the job only reads them."""
    places = (parse_place(uri) for _, uri in inputs_of(spec))
    claims = {place.root: True for place in places if place.scheme == "pvc"}
    for uri in (spec.output.uri, spec.dataset.cache):
        if uri and (place := parse_place(uri)).scheme == "pvc":
            claims[place.root] = False
    return dict(sorted(claims.items()))
