# The two images of KubeLoRA: `operator` (no torch) and `trainer` (torch with CUDA).
#
#   docker build --target operator -t kubelora-operator .
#   buildah bud --layers --isolation chroot --target trainer -t kubelora-trainer .
#
# The base is any Debian-like root filesystem with python3 >= 3.11, its venv module and CA
# certificates. Nothing else is assumed of it: no `python`, no pip, no compiler.
# Behind a private certificate authority pass its bundle, which leaves no trace in the images:
#   --secret id=ca,src=/path/to/bundle.pem --build-arg SSL_CERT_FILE=/run/secrets/ca
# Behind a package mirror name it: --build-arg PIP_INDEX_URL=... --build-arg UV_DEFAULT_INDEX=...
# (an image's history keeps build arguments: no passwords there).
# buildah needs --layers, or every build starts anew and each image is one layer.
ARG BASE_IMAGE=python:3.11-slim-bookworm
ARG UV_VERSION=0.13.9


# uv, which installs torch in seconds where pip takes minutes. It stays in this stage.
FROM ${BASE_IMAGE} AS tools
ARG SSL_CERT_FILE
ARG PIP_INDEX_URL
ARG UV_VERSION
RUN --mount=type=secret,id=ca \
    python3 -m venv /opt/uv \
    && /opt/uv/bin/python -m pip --disable-pip-version-check install --quiet --no-cache-dir \
        ${SSL_CERT_FILE:+--cert "$SSL_CERT_FILE"} "uv==${UV_VERSION}"


# What each image must have installed, read from pyproject.toml: an edit elsewhere in that file
# leaves these lists, and so the large layers made from them, as they were.
FROM ${BASE_IMAGE} AS requirements
WORKDIR /requirements
COPY pyproject.toml ./
RUN python3 -c 'import pathlib, tomllib; \
project = tomllib.loads(pathlib.Path("pyproject.toml").read_text())["project"]; \
[pathlib.Path(f"{image}.txt").write_text("\n".join([*project["dependencies"], \
*(need for extra in extras for need in project["optional-dependencies"][extra]), ""])) \
for image, extras in {"operator": ["operator"], "trainer": ["trainer", "trackers"]}.items()]'


# The product's own code, installed at the path where the images have their environment.
FROM tools AS package
ARG SSL_CERT_FILE
ARG UV_DEFAULT_INDEX
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY crds ./crds
COPY operator ./operator
COPY trainer ./trainer
# The root filesystem is read-only at run time: bytecode that is not compiled here is compiled again
# at every start. Files in an image never change, so it need not be checked against its source.
RUN --mount=type=secret,id=ca \
    python3 -m venv --without-pip /opt/kubelora \
    && PYC_INVALIDATION_MODE=UNCHECKED_HASH /opt/uv/bin/uv pip install --quiet --no-cache --no-deps \
        --compile-bytecode --python /opt/kubelora/bin/python3 /source \
    && rm -f /opt/kubelora/.lock


FROM tools AS operator-dependencies
ARG SSL_CERT_FILE
ARG UV_DEFAULT_INDEX
COPY constraints.txt /requirements/
COPY --from=requirements /requirements/operator.txt /requirements/
RUN --mount=type=secret,id=ca \
    python3 -m venv --without-pip /opt/kubelora \
    && PYC_INVALIDATION_MODE=UNCHECKED_HASH /opt/uv/bin/uv pip install --quiet --no-cache \
        --compile-bytecode --python /opt/kubelora/bin/python3 \
        -r /requirements/operator.txt -c /requirements/constraints.txt \
    && rm -f /opt/kubelora/.lock


# What both images share: the user, and an environment that writes nowhere but to /tmp.
FROM ${BASE_IMAGE} AS runtime
RUN groupadd --gid 10001 kubelora \
    && useradd --no-log-init --uid 10001 --gid 10001 --home-dir /tmp --no-create-home \
        --shell /usr/sbin/nologin kubelora
# USER: torch asks for a user's name, and a pod may run as an id that has none.
ENV PATH=/opt/kubelora/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    HOME=/tmp \
    USER=kubelora \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1
WORKDIR /tmp


FROM runtime AS operator
# The base may bring pip and the wheels that venv makes it from; an image that runs needs neither.
RUN rm -rf /usr/share/python-wheels /usr/local/bin/pip* \
    /usr/local/lib/python3*/ensurepip /usr/local/lib/python3*/site-packages/pip*
COPY --from=operator-dependencies /opt/kubelora /opt/kubelora
COPY --from=package /opt/kubelora /opt/kubelora
ARG VERSION=0.1.0
LABEL org.opencontainers.image.title="kubelora-operator" \
      org.opencontainers.image.description="Turns LoraTrainingJobs into training pods and tells how they fare." \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}"
USER 10001:10001
ENTRYPOINT ["kubelora-operator"]
CMD ["--help"]


FROM runtime AS trainer
ARG SSL_CERT_FILE
ARG PIP_INDEX_URL
ARG UV_DEFAULT_INDEX
ARG UV_VERSION
# Triton compiles a launcher with the C compiler and Python's headers when it first meets a kernel.
# The base's own Python may bring its headers along.
RUN --mount=type=secret,id=ca \
    headers="$(python3 -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h"; \
    apt="apt-get -qq ${SSL_CERT_FILE:+-o Acquire::https::CAInfo=$SSL_CERT_FILE}"; \
    export DEBIAN_FRONTEND=noninteractive; \
    $apt update \
    && $apt install -y --no-install-recommends gcc libc6-dev \
        $([ -e "$headers" ] || echo python3-dev) >/dev/null \
    && rm -rf /var/lib/apt/lists/* /var/cache/apt/*.bin /var/log/*
COPY constraints.txt /opt/kubelora/constraints.txt
COPY --from=requirements /requirements/trainer.txt /opt/kubelora/requirements.txt
# Installed here and not copied from a stage: 6 GB are then written once. uv comes and goes within
# this one layer; lent by a mount from `tools` it would be missing where buildah (1.28) takes that
# stage from its cache. Nothing links against the wheels' static libraries at run time.
RUN --mount=type=secret,id=ca \
    python3 -m venv /tmp/uv \
    && /tmp/uv/bin/python -m pip --disable-pip-version-check install --quiet --no-cache-dir \
        ${SSL_CERT_FILE:+--cert "$SSL_CERT_FILE"} "uv==${UV_VERSION}" \
    && python3 -m venv --without-pip /opt/kubelora \
    && PYC_INVALIDATION_MODE=UNCHECKED_HASH /tmp/uv/bin/uv pip install --quiet --no-cache \
        --compile-bytecode --python /opt/kubelora/bin/python3 \
        -r /opt/kubelora/requirements.txt -c /opt/kubelora/constraints.txt \
    && find /opt/kubelora -name '*.a' -delete \
    && rm -rf /tmp/uv /opt/kubelora/.lock /usr/share/python-wheels /usr/local/bin/pip* \
        /usr/local/lib/python3*/ensurepip /usr/local/lib/python3*/site-packages/pip*
COPY --from=package /opt/kubelora /opt/kubelora
ARG VERSION=0.1.0
LABEL org.opencontainers.image.title="kubelora-trainer" \
      org.opencontainers.image.description="Trains one LoraTrainingJob, measures its gradients and exports the adapter." \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}"
USER 10001:10001
ENTRYPOINT ["kubelora"]
CMD ["--help"]
