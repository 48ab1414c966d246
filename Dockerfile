# docker build -t blockdiff .                          on a CPU
# docker build -t blockdiff --build-arg DEVICE=cuda .  with CUDA; run it with --gpus all
FROM python:3.11-slim

ARG DEVICE=cpu

# The C functions for a CPU are compiled on the machine that runs them, and Triton compiles its launchers so, too.
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/blockdiff
COPY pyproject.toml setup.py constraints.txt README.md LICENSE ./
COPY blockdiff blockdiff
COPY cli cli
COPY docs docs
COPY recipes recipes

# PyPI's torch brings CUDA along; the other index has one without.
RUN if [ "$DEVICE" = cpu ]; then index="--extra-index-url https://download.pytorch.org/whl/cpu"; fi; \
    pip install --no-cache-dir --constraint constraints.txt $index ".[serve]"

# Mount the directory with recipes and data here; runs are written below it, and models from the Hub, tokens and whatever
# is compiled into its cache. So the container needs no home directory, and runs as any user who may write there (--user).
WORKDIR /work
ENV HOME=/tmp USER=blockdiff XDG_CACHE_HOME=/work/.cache HF_HOME=/work/.cache/huggingface
ENV TRITON_CACHE_DIR=/work/.cache/triton TORCHINDUCTOR_CACHE_DIR=/work/.cache/inductor MPLCONFIGDIR=/work/.cache/matplotlib
# blockdiff serve MODEL --host 0.0.0.0 --api-key-file FILE
EXPOSE 8000
ENTRYPOINT ["blockdiff"]
CMD ["--help"]
