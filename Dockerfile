# docker build -t dlm-rag .                               CPU (x86_64)
# docker build -t dlm-rag --build-arg LOCK=cuda .         NVIDIA GPUs (x86_64, aarch64): torch's wheels carry
#                                                         CUDA, nvidia-container-toolkit brings the driver
# docker run --rm -v dlm-rag:/cache dlm-rag sample
# docker run --rm --gpus all -v dlm-rag:/cache -v "$PWD":/data dlm-rag sample --corpus passages.jsonl ...
FROM python:3.11-slim

ARG LOCK=cpu
COPY requirements/${LOCK}.txt /tmp/requirements.txt
RUN pip install --no-cache-dir -r /tmp/requirements.txt

COPY setup.py pyproject.toml MANIFEST.in README.md LICENSE /src/
COPY configs /src/configs
COPY dlm_rag /src/dlm_rag
RUN pip install --no-cache-dir --no-deps --no-build-isolation /src \
    && useradd --uid 1000 dlm \
    && install --directory --mode 1777 /cache /data

# Indexes, models and compiled searches are kept here, whoever runs it (docker run --user).
ENV HOME=/cache
VOLUME /cache
WORKDIR /data
USER 1000
ENTRYPOINT ["dlm-rag"]
CMD ["--help"]
