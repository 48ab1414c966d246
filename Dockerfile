# docker build -t blockdiff .                          on a CPU
# docker build -t blockdiff --build-arg DEVICE=cuda .  with CUDA; run it with --gpus all
FROM python:3.11-slim

ARG DEVICE=cpu

# Triton compiles its launchers with a C compiler when a kernel runs for the first time.
RUN if [ "$DEVICE" = cuda ]; then \
        apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*; \
    fi

WORKDIR /opt/blockdiff
COPY pyproject.toml setup.py constraints.txt README.md LICENSE ./
COPY blockdiff blockdiff
COPY cli cli
COPY recipes recipes

# PyPI's torch brings CUDA along; the other index has one without.
RUN if [ "$DEVICE" = cpu ]; then index="--extra-index-url https://download.pytorch.org/whl/cpu"; fi; \
    pip install --no-cache-dir --constraint constraints.txt $index ".[serve]"

# Mount the directory with recipes and data here; runs are written below it, tokens and compiled kernels into its cache.
WORKDIR /work
ENV BLOCKDIFF_CACHE=/work/.cache/blockdiff TRITON_CACHE_DIR=/work/.cache/triton
# blockdiff serve MODEL --host 0.0.0.0 --api-key-file FILE
EXPOSE 8000
ENTRYPOINT ["blockdiff"]
CMD ["--help"]
