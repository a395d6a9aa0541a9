# For machines with NVIDIA GPUs. This file has never been built, and no GPU has run it: it states which
# versions belong together. MXNet 1.9.1's CUDA build wants CUDA 11, which comes with the wheels of
# the extra [cu112]; the host needs its driver and the NVIDIA container toolkit.
#
#     docker build -t gluon-amp .
#     docker run --rm --gpus all gluon-amp doctor
FROM nvidia/cuda:11.8.0-base-ubuntu22.04

RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ make python3 python3-dev python3-venv \
       libgomp1 libopenblas0 libquadmath0 \
    && rm -rf /var/lib/apt/lists/*

RUN python3 -m venv /opt/gluon-amp
ENV PATH=/opt/gluon-amp/bin:$PATH

COPY . /src
# The engine is compiled against the headers of mxnet==1.9.1, which pip brings for the build alone;
# at run time there is one MXNet, the CUDA build.
RUN pip install --no-cache-dir '/src[cu112,demo]' && mkdir /work && cp -r /src/example /work/

WORKDIR /work
ENTRYPOINT ["gluon-amp"]
CMD ["doctor"]
