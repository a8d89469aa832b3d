# Penstock's server. No Docker has built or run it: its authors had none, see docs/how-to/clients.md.
# `make test-image` does without Docker what stands here, stage by stage, and starts the server from that.
#
#     docker build -t penstock .
#     docker run --init -p 127.0.0.1:8000:8000 penstock

FROM python:3.11-slim AS build
# Address of a package index to take PyTorch from, instead of pip's default: its own has one for CPUs, a tenth of the
# size, and one for every CUDA.
ARG TORCH_INDEX=
WORKDIR /src
COPY constraints.txt ./
RUN python -m venv /opt/penstock \
    && /opt/penstock/bin/pip install --no-cache-dir ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} --constraint constraints.txt torch
COPY pyproject.toml README.md LICENSE ./
# The manual page is a part of the wheel.
COPY docs/reference/penstock.1 docs/reference/
COPY penstock penstock
RUN /opt/penstock/bin/pip install --no-cache-dir --constraint constraints.txt .

FROM python:3.11-slim
RUN useradd --create-home penstock
COPY --from=build /opt/penstock /opt/penstock
ENV PATH=/opt/penstock/bin:$PATH PYTHONUNBUFFERED=1
USER penstock
WORKDIR /home/penstock
# Made here so that a volume mounted on it belongs to the user.
RUN mkdir -p .cache/huggingface
EXPOSE 8000
# Loading a large checkpoint takes minutes; until then the container is starting, not ill.
HEALTHCHECK --start-period=10m --interval=30s --timeout=10s \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=8)"]
ENTRYPOINT ["penstock", "serve", "--host", "0.0.0.0"]
CMD ["demo"]
