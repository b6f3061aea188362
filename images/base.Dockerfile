# The base image where a container registry is reachable; elsewhere mmdebstrap makes an equal one.
FROM python:3.11-slim-bookworm
ARG PACKAGES
RUN apt-get update && apt-get install -y --no-install-recommends ${PACKAGES} && rm -rf /var/lib/apt/lists/*
