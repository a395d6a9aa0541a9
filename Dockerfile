# An image for NVIDIA GPUs, or with --build-arg BUILD=cpu for CPUs; BUILD is an extra of pyproject.toml.
# CUDA's libraries come from the extra's Python packages. The host needs its driver and the NVIDIA
# container toolkit. This file has never been built: hadolint alone has checked it.
#
#     docker build -t gluon-amp .
#     docker run --rm --gpus all gluon-amp doctor
FROM ubuntu:22.04

# The versions of Debian's packages are those of the base image's release.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ make python3 python3-dev python3-venv \
       libgomp1 libquadmath0 \
    && rm -rf /var/lib/apt/lists/*

RUN python3 -m venv /opt/gluon-amp
ENV PATH=/opt/gluon-amp/bin:$PATH \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility

COPY . /src
# The engine is compiled against the headers of mxnet==1.9.1, which setup.py fetches for the build
# alone: the image has one MXNet, that of the extra.
ARG BUILD=cu112
RUN pip install --no-cache-dir "/src[$BUILD,demo]" && mkdir /work && cp -r /src/example /work/

WORKDIR /work
ENTRYPOINT ["gluon-amp"]
CMD ["doctor"]
