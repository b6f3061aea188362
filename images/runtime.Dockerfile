# Python packages on top of the base, from wheels in the build context: nothing is fetched here.
ARG BASE
FROM ${BASE} AS stage
ARG STAGE
LABEL testbed.image=stage testbed.stage=${STAGE}
COPY wheels /wheels
RUN python3 "$(ls /wheels/pip-*.whl)/pip" install --quiet --no-index --no-deps --no-cache-dir --disable-pip-version-check \
    --root-user-action=ignore --target /opt/testbed/packages /wheels/*.whl && rm -rf /opt/testbed/packages/pip*

FROM ${BASE}
COPY --from=stage /opt/testbed/packages /opt/testbed/packages
RUN useradd --no-create-home --uid 10001 --home-dir /tmp device
ENV PYTHONPATH=/opt/testbed/code:/opt/testbed/packages PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HOME=/tmp
WORKDIR /tmp
# An image whose packages cannot be imported fails here and not in a run.
ARG MODULES
RUN python3 -c "import ${MODULES}"
