# The command line of knnstore: docker build -t knnstore .
#
# For a GPU, with the CUDA version of your driver: --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu130

FROM python:3.11-slim-trixie AS build

ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG EXTRAS=faiss,qdrant,postgres,server

ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/knnstore
ENV PATH=/opt/knnstore/bin:$PATH
WORKDIR /source

# The constraints also bind what the wheel is built with; newer versions of pip read the second name.
COPY constraints.txt ./
ENV PIP_CONSTRAINT=/source/constraints.txt PIP_BUILD_CONSTRAINT=/source/constraints.txt
# By itself and first: it is large and seldom changes, and the package index has it for GPUs only.
RUN pip install --no-deps --index-url "$TORCH_INDEX" torch

COPY pyproject.toml README.md LICENSE ./
COPY knnstore knnstore
COPY adapters adapters
COPY migrations migrations
RUN pip wheel --no-deps --wheel-dir dist . && pip install "$(echo dist/*.whl)[$EXTRAS]" && pip check


FROM python:3.11-slim-trixie

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
