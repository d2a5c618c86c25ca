# The cache manager: numpy, gRPC and a Redis client; no torch.
# Build from the root of the repository: docker build -f docker/manager.Dockerfile -t scissorhands-manager .
ARG PYTHON_IMAGE=python:3.11.13-slim-bookworm

FROM ${PYTHON_IMAGE} AS build
RUN python -m venv /opt/scissorhands
WORKDIR /src
COPY constraints.txt pyproject.toml README.md LICENSE ./
COPY scissorhands ./scissorhands
COPY server ./server
COPY client ./client
# Without what no server reads: packages' own tests, types and headers, numpy's compilers, colors of programming languages,
# and what `scissorhands chat` edits its line with.
RUN /opt/scissorhands/bin/pip install --no-cache-dir --disable-pip-version-check -c constraints.txt '.[manager]' \
    && find /opt/scissorhands -type d \( -name tests -o -path '*/numpy/distutils' -o -path '*/numpy/f2py' \
        -o -path '*/pygments/lexers/__pycache__' \) -prune -exec rm -rf {} + \
    && find /opt/scissorhands \( -name '*.pyi' -o -name '*.a' -o -name '*.h' \) -delete \
    && find /opt/scissorhands -path '*/pygments/lexers/*' ! -name __init__.py ! -name _mapping.py -type f -delete \
    && /opt/scissorhands/bin/pip uninstall --yes --quiet prompt-toolkit wcwidth setuptools pip

FROM ${PYTHON_IMAGE}
LABEL org.opencontainers.image.title="scissorhands-manager" \
      org.opencontainers.image.description="The cache manager of Scissorhands: budgets, eviction plans, segments in Redis" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="0.1.0"
RUN groupadd --gid 10001 scissorhands \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /nonexistent --shell /usr/sbin/nologin scissorhands
COPY --from=build /opt/scissorhands /opt/scissorhands
# Inside a container the servers listen on all its addresses; what is published decides who reaches them.
ENV PATH=/opt/scissorhands/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    SCISSORHANDS_MANAGER_HOST=0.0.0.0
USER 10001:10001
WORKDIR /tmp
EXPOSE 50052 9102
HEALTHCHECK --interval=10s --timeout=5s --start-period=15s --retries=3 \
    CMD ["python", "-m", "scissorhands_server.healthcheck", "127.0.0.1:50052"]
ENTRYPOINT ["scissorhands"]
CMD ["manager"]
