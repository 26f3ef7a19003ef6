# The command line of knnstore: docker build -t knnstore .
#
# For a GPU, with a driver for CUDA 13: --build-arg TORCH=cuda
# vLLM with the plugin: docker build --target vllm -t knnstore-vllm .
# All packages have their hashes in requirements/, which `make lock` writes; the base image can have a digest,
# see docs/how-to/pin-images-and-packages.md.

ARG PYTHON_DIGEST=
ARG VLLM_DIGEST=
FROM python:3.11-slim-trixie${PYTHON_DIGEST} AS build

ARG TORCH=cpu

ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/build && python -m venv /opt/knnstore
WORKDIR /source

COPY requirements requirements
# By itself and first: it is large and seldom changes.
RUN /opt/knnstore/bin/pip install --no-deps --require-hashes -r requirements/torch-$TORCH.txt
RUN /opt/knnstore/bin/pip install --no-deps --require-hashes -r requirements/image.txt
RUN /opt/build/bin/pip install --no-deps --require-hashes -r requirements/build.txt

COPY pyproject.toml README.md LICENSE ./
COPY knnstore knnstore
COPY adapters adapters
COPY migrations migrations
RUN /opt/build/bin/pip wheel --no-index --no-deps --no-build-isolation --wheel-dir dist . \
    && /opt/knnstore/bin/pip install --no-index --no-deps dist/*.whl \
    && /opt/knnstore/bin/pip check


# vLLM's image has what the plugin needs but for a few packages, requirements/vllm.txt.
FROM vllm/vllm-openai:v0.32.0${VLLM_DIGEST} AS vllm

COPY --from=build /source/requirements/vllm.txt /source/dist/*.whl /source/
RUN python3 -m pip install --no-deps --require-hashes -r /source/vllm.txt \
    && python3 -m pip install --no-index --no-deps /source/*.whl \
    && groupadd --gid 10001 knnstore \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin knnstore

ENV HOME=/tmp KNNSTORE_HOME=/data/store HF_HOME=/models HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1
USER 10001:10001
WORKDIR /tmp


FROM python:3.11-slim-trixie${PYTHON_DIGEST}

RUN groupadd --gid 10001 knnstore \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /data --shell /usr/sbin/nologin knnstore \
    && install --directory --owner knnstore --group knnstore --mode 700 /data /models
# Owned by root: what runs here cannot change its own code.
COPY --from=build /opt/knnstore /opt/knnstore
COPY scripts/docker-entrypoint /usr/local/bin/

ENV PATH=/opt/knnstore/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    KNNSTORE_HOME=/data/store \
    HF_HOME=/models
USER 10001:10001
WORKDIR /data
ENTRYPOINT ["docker-entrypoint"]
CMD ["--help"]
