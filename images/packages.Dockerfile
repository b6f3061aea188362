# Python packages of a user's program on top of Debian, Python and torch, from wheels in the build context.
ARG RUNTIME
FROM ${RUNTIME} AS stage
ARG STAGE
LABEL testbed.image=stage testbed.stage=${STAGE}
COPY wheels /wheels
RUN env -u PYTHONPATH python3 "$(ls /wheels/pip-*.whl)/pip" install --quiet --no-index --no-deps --no-cache-dir --disable-pip-version-check \
    --root-user-action=ignore --target /opt/more /wheels/*.whl && rm -rf /opt/more/pip*

FROM ${RUNTIME}
COPY --from=stage /opt/more /opt/more
ENV PYTHONPATH=/opt/more:/opt/testbed/packages PATH=/opt/more/bin:/usr/local/bin:/usr/bin:/bin
