"""The claims that a job's URIs name: mounted by the operator, stood in for by ``--mount``."""

from kubelora_api.places import parse_place
from kubelora_api.spec import JobSpec


def claims_of(spec: JobSpec) -> dict[str, bool]:
    """Claims by name, and whether the job only reads them."""
    extra = [source.uri for source in spec.dataset.extra_sources]
    inputs = [
        spec.model.uri,
        spec.model.config,
        spec.model.vae,
        spec.adapter.from_,
        spec.dataset.uri,
        spec.health.baseline,
        *extra,
    ]
    claims = {p.root: True for uri in inputs if uri and (p := parse_place(uri)).scheme == "pvc"}
    for uri in (spec.output.uri, spec.dataset.cache):
        if uri and (place := parse_place(uri)).scheme == "pvc":
            claims[place.root] = False
    return dict(sorted(claims.items()))
