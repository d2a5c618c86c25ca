# The worker: torch, transformers and the model, which is mounted, not copied.
# Build from the root of the repository: docker build -f docker/worker.Dockerfile -t scissorhands-worker .
ARG PYTHON_IMAGE=python:3.11.13-slim-bookworm

FROM ${PYTHON_IMAGE} AS build
RUN python -m venv /opt/scissorhands
WORKDIR /src
# Torch has a layer of its own, so that a change of the code does not install it again. TORCH_INDEX_URL is an additional
# package index for it: one that holds only CPU builds makes the image some gigabytes smaller, and one of another CUDA
# version fits an older driver. Empty takes the default build, which runs on a CPU and, with the container's
# GPU runtime, on an NVIDIA GPU. TORCH_INDEX_HOST is a host that serves such an index without TLS.
ARG TORCH_INDEX_URL=
ARG TORCH_INDEX_HOST=
COPY constraints.txt ./
RUN PIP_EXTRA_INDEX_URL="${TORCH_INDEX_URL}" PIP_TRUSTED_HOST="${TORCH_INDEX_HOST}" \
    /opt/scissorhands/bin/pip install --no-cache-dir --disable-pip-version-check -c constraints.txt torch
COPY pyproject.toml README.md LICENSE ./
COPY scissorhands ./scissorhands
COPY server ./server
COPY client ./client
RUN /opt/scissorhands/bin/pip install --no-cache-dir --disable-pip-version-check -c constraints.txt '.[worker]'

FROM ${PYTHON_IMAGE}
LABEL org.opencontainers.image.title="scissorhands-worker" \
      org.opencontainers.image.description="The worker of Scissorhands: decodes under a hard KV-cache budget" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="0.1.0"
RUN groupadd --gid 10001 scissorhands \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /nonexistent --shell /usr/sbin/nologin scissorhands \
    && install --directory --owner=10001 --group=10001 /var/cache/scissorhands
COPY --from=build /opt/scissorhands /opt/scissorhands
# Inside a container the servers listen on all its addresses; what is published decides who reaches them.
ENV PATH=/opt/scissorhands/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    HF_HOME=/var/cache/scissorhands/huggingface \
    NUMBA_CACHE_DIR=/var/cache/scissorhands/numba \
    SCISSORHANDS_WORKER_CACHE_FOLDER=/var/cache/scissorhands/models \
    SCISSORHANDS_WORKER_HOST=0.0.0.0 \
    SCISSORHANDS_WORKER_METRICS_HOST=0.0.0.0
USER 10001:10001
WORKDIR /tmp
EXPOSE 50051 9101
# Loading a large model takes minutes, during which a failed check does not count.
HEALTHCHECK --interval=10s --timeout=5s --start-period=600s --retries=3 \
    CMD ["python", "-m", "scissorhands_server.healthcheck", "127.0.0.1:50051"]
ENTRYPOINT ["scissorhands"]
CMD ["worker"]
