# The server with SmolLM2's drafter and length predictor in it; models are downloaded at the first start into /cache.
#   docker build -t jaxspec .                                  for CPUs
#   docker build -t jaxspec --build-arg EXTRAS=cuda12 .        for NVIDIA GPUs (or cuda13); run it with --gpus all
#   docker run -p 8000:8000 -v jaxspec-cache:/cache jaxspec --config configs/default.yaml
FROM python:3.12-slim

# The CPU kernels are compiled for the machine at the first start, and kept in /cache.
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*

ARG EXTRAS=
WORKDIR /jaxspec
COPY pyproject.toml README.md LICENSE ./
COPY jaxspec jaxspec
COPY models models
COPY sched sched
COPY train_predictor train_predictor
COPY configs configs
RUN pip install --no-cache-dir ".${EXTRAS:+[$EXTRAS]}"

RUN useradd --create-home server && mkdir /cache && chown server /cache
USER server
# JAXSPEC_HOST and the like are the server's options. Without a key, everyone who reaches the port may use it.
ENV JAXSPEC_CACHE=/cache JAXSPEC_HOST=0.0.0.0
VOLUME /cache
EXPOSE 8000
# The first start downloads the model and compiles for minutes.
HEALTHCHECK --start-period=10m --interval=10s CMD ["python", "-c", "import httpx; httpx.get('http://127.0.0.1:8000/health').raise_for_status()"]
ENTRYPOINT ["python", "-m", "jaxspec.serve"]
CMD ["--config", "configs/default.yaml"]
