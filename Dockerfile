# An image of the server for CPUs. docs/monitoring.md describes how to run it.
ARG PYTHON=3.12-slim-bookworm

FROM python:${PYTHON} AS build
# Debian removes old versions of g++ from its archive, so none is pinned.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
COPY . /src
RUN python -m venv /opt/lmdeploy \
    && CMAKE_ARGS=-DTM_CUDA=OFF /opt/lmdeploy/bin/pip install --no-cache-dir "/src[otlp]" \
    && /opt/lmdeploy/bin/python -c "from lmdeploy import _turbomind"

FROM python:${PYTHON}
COPY --from=build /opt/lmdeploy /opt/lmdeploy
RUN useradd --uid 10001 --user-group --no-create-home --shell /usr/sbin/nologin lmdeploy \
    && install -d -o lmdeploy -g lmdeploy /models /cache
# Models are read from /models. Downloads and packed weights go to /cache.
ENV PATH=/opt/lmdeploy/bin:$PATH \
    HF_HOME=/cache/huggingface \
    LMDEPLOY_CACHE_DIR=/cache/packed \
    PYTHONUNBUFFERED=1
VOLUME ["/models", "/cache"]
WORKDIR /models
USER 10001:10001
EXPOSE 23333
# The start period covers a download and the first conversion of a model.
HEALTHCHECK --interval=30s --timeout=5s --start-period=30m --retries=3 \
    CMD ["python", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:23333/health', timeout=4)"]
ENTRYPOINT ["lmdeploy", "serve", "api_server", "--server-name", "0.0.0.0"]
CMD ["--help"]
