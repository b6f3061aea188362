# An image of the user's, with the agent in a folder beside it: on a Python and a C library of its own, it needs nothing of the image.
ARG AGENT
ARG IMAGE
FROM ${AGENT} AS agent
FROM ${IMAGE}
COPY --from=agent / /opt/testbed/machine/
COPY --from=agent --chown=10001:10001 /state /state
USER 10001:10001
EXPOSE 8700 8701 8702/udp
# -E: a PYTHONPATH of the image is for its own Python.
ENTRYPOINT ["/opt/testbed/machine/loader", "--library-path", "/opt/testbed/machine/libraries:/opt/testbed/machine/usr/local/lib", \
    "/opt/testbed/machine/python", "-u", "-E", "-c", "import runpy, sys; sys.dont_write_bytecode = True; \
sys.path[:0] = ['/opt/testbed/machine/opt/testbed/code', '/opt/testbed/machine/opt/testbed/packages']; \
runpy.run_module('testbed_agent', run_name='__main__')"]
CMD []
